"""Patches that bring mended defects back, and the tests that find them.

Each ``*.patch`` here re-introduces one defect into the present tree. Comment lines before its first ``diff`` name the
tests that fail with it, one ``# killed by: <path>::<test>`` a line. ``test_mutants.py`` checks that every patch applies
and that its tests exist. ``python -m tests.mutants`` applies each patch to a copy of the tree, runs its tests and
reports the mutants that survive.
"""
