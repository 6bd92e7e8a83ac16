"""The data path: logs in segment files, the journal, and the threads that read and write them."""
