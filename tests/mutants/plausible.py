"""Defects that nobody made: small changes to the engine that a hurried reader could take for right.

They are for ``python -m tests.mutants --generic``, which asks whether tests that were written for no defect in
particular find them. Each is one piece of text in one file, which must be there exactly once, and what stands there
instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["PLAUSIBLE", "Change"]

_STORAGE = "src/flintmq/broker/storage"
_DELIVERY = "src/flintmq/broker/delivery"
_KERNEL = "src/flintmq/kernel"


@dataclass(frozen=True)
class Change:
    name: str
    file: str
    old: str
    new: str

    @property
    def touches_kernel(self) -> bool:
        return self.file.startswith(_KERNEL)

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: the text is in {self.file} {count} times, not once")
        path.write_text(text.replace(self.old, self.new))


PLAUSIBLE = [
    # --- Syncs -----------------------------------------------------------------------------------------------------
    Change(
        "sync_covers_what_was_written_meanwhile",
        f"{_STORAGE}/syncer.py",
        "log.made_durable(sync.mark)",
        "log.made_durable(log.whole)",
    ),
    Change(
        "sync_of_some_files_counts_for_all",
        f"{_STORAGE}/syncer.py",
        "elif not sync.left or log.closed or disk.closing:",
        "elif sync.left.clear() or True:",
    ),
    Change(
        "sync_leaves_out_the_folder",
        f"{_STORAGE}/syncer.py",
        "folder = log.folder if any(not segment.folder_synced for segment in pinned) else None",
        "folder = None",
    ),
    Change(
        "sync_that_failed_counts",
        f"{_STORAGE}/syncer.py",
        "        if error is not None:\n            # Never retried",
        "        if error is not None and not isinstance(error, OSError):\n            # Never retried",
    ),
    Change(
        "fsync_answers_what_is_written",
        f"{_STORAGE}/log.py",
        '        if self.durability == "fsync":\n            return self.durable',
        '        if self.durability == "fsync":\n            return self.whole',
    ),
    # --- Writing ---------------------------------------------------------------------------------------------------
    Change(
        "batch_is_answered_before_its_end",
        f"{_STORAGE}/log.py",
        "return self.written if group is None else group[2]",
        "return self.written",
    ),
    Change(
        "failed_write_stays_in_memory",
        f"{_STORAGE}/log.py",
        "        self._cut_back(seq)\n        self._failed(seq, exc)",
        "        self._pending.clear()\n        self._failed(seq, exc)",
    ),
    Change(
        "failed_write_stays_in_the_file",
        f"{_STORAGE}/log.py",
        "        if segment in self.segments:\n            self._cut_file(segment, seq, offset)\n"
        "        for piece in pieces:",
        "        for piece in pieces:",
    ),
    Change(
        "failed_write_goes_on_in_its_file",
        f"{_STORAGE}/log.py",
        "        self._active = None\n        if segment in self.segments:\n"
        "            self._cut_file(segment, seq, offset)\n",
        "        if segment in self.segments:\n            self._cut_file(segment, seq, offset)\n",
    ),
    Change(
        "lane_writes_wait_for_no_sync",
        f"{_STORAGE}/log.py",
        "            self.syncer.wrote(segment, intake.wrote, count)\n            self.syncer.sync_if_due()\n",
        "            self.syncer.sync_if_due()\n",
    ),
    Change(
        "batch_goes_on_in_another_file",
        f"{_STORAGE}/log.py",
        "segment.size > FILE_HEADER and not self._group_planned)",
        "segment.size > FILE_HEADER)",
    ),
    Change(
        "deferral_is_not_written",
        f"{_STORAGE}/log.py",
        "flags = DEFERRED if delay else 0",
        "flags = 0",
    ),
    Change(
        "deferral_counts_from_its_due_time",
        f"{_STORAGE}/log.py",
        "self.deferred.extend((seq, started + delay) for seq",
        "self.deferred.extend((seq, started) for seq",
    ),
    # --- Ranges ----------------------------------------------------------------------------------------------------
    Change(
        "range_loses_the_one_behind_a_hole",
        f"{_STORAGE}/ranges.py",
        "right = (stop, stops[j - 1]) if stops[j - 1] > stop else None",
        "right = (stop + 1, stops[j - 1]) if stops[j - 1] > stop + 1 else None",
    ),
    Change(
        "range_keeps_the_last_of_a_hole",
        f"{_STORAGE}/ranges.py",
        "left = (starts[i], first) if starts[i] < first else None",
        "left = (starts[i], first + 1) if starts[i] < first else None",
    ),
    # --- Journal ---------------------------------------------------------------------------------------------------
    Change(
        "journal_sync_covers_what_was_written_meanwhile",
        f"{_STORAGE}/journal.py",
        "        self._roll_if_due()\n        self._reached(mark)",
        "        self._roll_if_due()\n        self._reached(self._written)",
    ),
    Change(
        "snapshot_is_not_synced",
        f"{_STORAGE}/journal.py",
        "            self._disk.write(fd, [end], offset)\n            self._disk.sync(fd)",
        "            self._disk.write(fd, [end], offset)",
    ),
    Change(
        "snapshot_has_no_entry_yet_when_others_go",
        f"{_STORAGE}/journal.py",
        "        self._disk.rename(temporary, self._folder / name)\n        self._disk.sync_folder(self._folder)",
        "        self._disk.rename(temporary, self._folder / name)",
    ),
    Change(
        "snapshot_deletes_the_journal_behind_it",
        f"{_STORAGE}/journal.py",
        "and digits.isdecimal() and int(digits) < number:",
        'and digits.isdecimal() and int(digits) <= number and kind == "journal":',
    ),
    Change(
        "journal_rolls_without_syncing_the_old_one",
        f"{_STORAGE}/journal.py",
        "                self._disk.sync(old)\n                self._disk.sync(fd)",
        "                self._disk.sync(fd)",
    ),
    Change(
        "journal_begins_without_its_entry",
        f"{_STORAGE}/journal.py",
        "        self._disk.sync(self._fd)\n        self._disk.sync_folder(self._folder)\n        self._settled",
        "        self._disk.sync(self._fd)\n        self._settled",
    ),
    Change(
        "journal_batches_are_believed",
        f"{_STORAGE}/journal.py",
        "if mark != salt or len(entries) < length or google_crc32c.extend(salt, entries) != crc:",
        "if mark != salt or len(entries) < length:",
    ),
    # --- Starts ----------------------------------------------------------------------------------------------------
    Change(
        "footer_is_believed",
        f"{_STORAGE}/recovery.py",
        "            if segment.end <= durable:\n",
        "            if segment.end:\n",
    ),
    Change(
        "recovered_copy_is_not_synced",
        f"{_STORAGE}/recovery.py",
        "        self._disk.write(out, [copy.seal()], copy.size)\n        self._disk.sync(out)",
        "        self._disk.write(out, [copy.seal()], copy.size)",
    ),
    Change(
        "recovered_copy_has_no_entry",
        f"{_STORAGE}/recovery.py",
        "        self._disk.rename(temporary, path)\n        self._store.sync_folder(self._folder)",
        "        self._disk.rename(temporary, path)",
    ),
    Change(
        "file_is_deleted_that_is_needed",
        f"{_STORAGE}/removal.py",
        "if max(segment.end, stop) > seq:",
        "if segment.base >= seq:",
    ),
    # --- Topics ----------------------------------------------------------------------------------------------------
    Change(
        "numbers_are_used_before_they_are_reserved",
        f"{_DELIVERY}/topic.py",
        "        self.broker.journal.when_synced(position, usable)",
        "        usable()",
    ),
    Change(
        "answer_is_one_message_early",
        f"{_DELIVERY}/topic.py",
        "while commits and commits[0].end <= committed and",
        "while commits and commits[0].end <= committed + 1 and",
    ),
    Change(
        "channels_see_what_is_not_committed",
        f"{_DELIVERY}/topic.py",
        "        committed = self.log.committed\n        if committed > self._usable",
        "        committed = self.log.end\n        if committed > self._usable",
    ),
    Change(
        "paused_topic_hands_on",
        f"{_DELIVERY}/topic.py",
        "        if committed > self.pumped and not self.frozen:",
        "        if committed > self.pumped:",
    ),
    Change(
        "refused_publish_is_answered_with_ok",
        f"{_DELIVERY}/topic.py",
        "            commit.resolve(PublishError(reason))\n\n    def _arrived",
        "            commit.resolve()\n\n    def _arrived",
    ),
    Change(
        "keys_are_forgotten_at_a_start",
        f"{_DELIVERY}/topic.py",
        "        if keys.restore():\n            self.keys = keys",
        "        keys.restore()",
    ),
    # --- Channels --------------------------------------------------------------------------------------------------
    Change(
        "fin_of_another_is_accepted",
        f"{_DELIVERY}/channel.py",
        "        if owner != session.ident:\n            reason",
        "        if not owner:\n            reason",
    ),
    Change(
        "timeout_is_no_attempt",
        f"{_DELIVERY}/channel.py",
        "        if not self._gave_up(seq, attempts, TIMED_OUT):\n            self.requeue_at(seq, attempts, 0)",
        "        if not self._gave_up(seq, attempts, TIMED_OUT):\n            self.requeue_at(seq, attempts - 1, 0)",
    ),
    Change(
        "requeue_ignores_its_delay",
        f"{_DELIVERY}/channel.py",
        "self.requeue_at(seq, attempts, self.broker.clock.now() + delay if delay > 0 else 0)\n        self.wake",
        "self.requeue_at(seq, attempts, 0)\n        self.wake",
    ),
    Change(
        "finished_runs_are_not_noted",
        f"{_DELIVERY}/channel.py",
        "        if not self._noted:\n            self._note()\n\n    def _note",
        "\n    def _note",
    ),
    Change(
        "requeues_are_not_noted",
        f"{_DELIVERY}/channel.py",
        '        self._back += array("q", (seq, attempts, due, wall))',
        '        self._back += array("q", ())',
    ),
    Change(
        "touch_adds_nothing",
        f"{_DELIVERY}/channel.py",
        "message.deadline = min(self.broker.clock.now() + session.msg_timeout, longest)",
        "message.deadline = min(message.delivered + session.msg_timeout, longest)",
    ),
    Change(
        "paused_channel_delivers",
        f"{_DELIVERY}/channel.py",
        "if not ready or self.paused or self.exiting or self.seeking is not None:",
        "if not ready or self.exiting or self.seeking is not None:",
    ),
    Change(
        "consumer_gets_more_than_it_is_ready_for",
        f"{_DELIVERY}/channel.py",
        "        if most > limit:\n            most = limit\n",
        "        if most > limit:\n            most = limit + 1\n",
    ),
    Change(
        "first_delivery_times_out_at_half_time",
        f"{_DELIVERY}/channel.py",
        "deadline = (now + timeout + QUANTUM - 1) & -QUANTUM",
        "deadline = (now + timeout // 2 + QUANTUM - 1) & -QUANTUM",
    ),
    Change(
        "lost_consumer_gives_back_at_once",
        f"{_DELIVERY}/channel.py",
        "if session.in_flight and self.broker.options.requeue_on_disconnect and not",
        "if session.in_flight and not",
    ),
    Change(
        "deferral_is_due_a_little_early",
        f"{_DELIVERY}/channel.py",
        "            if due <= now:\n                self.requeued.append(seq)",
        "            if due <= now + 20_000_000:\n                self.requeued.append(seq)",
    ),
    Change(
        "deadline_of_half_a_run_is_forgotten",
        f"{_DELIVERY}/in_flight.py",
        "while self._head < len(self._stops) and self._stops[self._head] <= lo:",
        "while self._head < len(self._stops) and self._firsts[self._head] < lo:",
    ),
    Change(
        "old_messages_are_delivered",
        f"{_DELIVERY}/expiry.py",
        "        return self._topic.broker.clock.wall() - self._topic.settings.ttl",
        "        return self._topic.broker.clock.wall() - 2 * self._topic.settings.ttl",
    ),
    # --- Staged publishes --------------------------------------------------------------------------------------------
    Change(
        "staged_chunks_are_published_again",
        "src/flintmq/broker/stage/apply.py",
        "return self._digest(attempt, number) in topic.keys.reserved",
        "return False",
    ),
    Change(
        "epoch_is_given_twice",
        "src/flintmq/broker/stage/producer.py",
        "state.epoch = max(state.epoch, state.fence) + 1",
        "state.epoch = max(state.epoch, state.fence, 1)",
    ),
    # --- The kernel ------------------------------------------------------------------------------------------------
    Change(
        "lane_answers_before_it_writes",
        f"{_KERNEL}/lane.py",
        "            if answer and block.used > used:\n",
        "            if answer and block.used > used:\n                self._answer(fds)\n",
    ),
    Change(
        "lane_numbers_records_by_one_more",
        f"{_KERNEL}/lane.py",
        "self._write(tail, used, block.count - count, tail.seq + count - origin)",
        "self._write(tail, used, block.count - count, tail.seq + count - origin + (count > origin))",
    ),
    Change(
        "lane_writes_all_to_one_place",
        f"{_KERNEL}/lane.py",
        "[head, block.view[start : block.used]], tail.offset + self.wrote)",
        "[head, block.view[start : block.used]], tail.offset)",
    ),
    Change(
        "lane_takes_a_short_write_for_a_whole_one",
        f"{_KERNEL}/lane.py",
        "            if n != size + RECORD_HEADER:\n                self.error = -n if n < 0 else ENOSPC\n"
        "                return self.error\n            self.wrote += n\n",
        "            if n < 0:\n                self.error = -n\n"
        "                return self.error\n            self.wrote += size + RECORD_HEADER\n",
    ),
    Change(
        "finished_range_is_one_too_long",
        f"{_KERNEL}/lane.py",
        "                    ranges[used] = v\n                    ranges[used + 1] = v + 1\n",
        "                    ranges[used] = v\n                    ranges[used + 1] = v + 2\n",
    ),
    Change(
        "lane_finishes_for_others",
        f"{_KERNEL}/lane.py",
        "if v < low or v >= high or owners[v & mask] != owner:",
        "if v < low or v >= high or not owners[v & mask]:",
    ),
]
