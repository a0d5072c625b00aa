"""Solutions and mistakes for the steps of stage 1."""


class Step1:
    class right_walks_through_the_holders:
        """Go from holder to holder, and collect what is free before each and after the last."""

        class SlotManager:
            def free_ranges(self):
                ranges, start = [], 0
                for seq in sorted(self._holders, key=lambda seq: seq.slots.start):
                    if start < seq.slots.start:
                        ranges.append(range(start, seq.slots.start))
                    start = seq.slots.stop
                if start < self.num_slots:
                    ranges.append(range(start, self.num_slots))
                return ranges

            def _first_fit(self, size):
                for slots in self.free_ranges():
                    if len(slots) >= size:
                        return slots.start
                return None

    class right_looks_at_each_slot:
        """Go from slot to slot, and let the last range grow; free() compares the reports itself."""

        class SlotManager:
            def free_ranges(self):
                held = {slot for seq in self._holders for slot in seq.slots}
                ranges = []
                for slot in range(self.num_slots):
                    if slot in held:
                        continue
                    if ranges and ranges[-1].stop == slot:
                        ranges[-1] = range(ranges[-1].start, slot + 1)
                    else:
                        ranges.append(range(slot, slot + 1))
                return ranges

            def allocate(self, seq):
                size = self.num_reserved(seq)
                if not self.can_allocate(seq):
                    raise AssertionError(f"no {size} slots in a row")
                start = self._first_fit(size)
                seq.slots = range(start, start + size)
                self._holders |= {seq}

            def free(self, seq):
                self._peak = max(self._peak, self.report(), key=lambda report: (report.held, report.used))
                slots = seq.slots
                self._holders.discard(seq)
                seq.slots = None
                self._observer.tell("free", seq, slots)

    class wrong_forgets_the_end_of_the_pool:
        """What is behind the last holder is not free."""

        red = "an empty pool of 10 slots"

        class SlotManager:
            def free_ranges(self):
                ranges, start = [], 0
                for seq in sorted(self._holders, key=lambda seq: seq.slots.start):
                    if start < seq.slots.start:
                        ranges.append(range(start, seq.slots.start))
                    start = seq.slots.stop
                return ranges

    class wrong_does_not_join_slots:
        """Each free slot is a range of its own."""

        red = "an empty pool of 10 slots"

        class SlotManager:
            def free_ranges(self):
                held = {slot for seq in self._holders for slot in seq.slots}
                return [range(slot, slot + 1) for slot in range(self.num_slots) if slot not in held]

    class wrong_keeps_empty_ranges:
        """Two holders that touch have an empty range between them."""

        red = "a full pool"
        unseen = "a range of no slots has room for nobody"

        class SlotManager:
            def free_ranges(self):
                held = sorted((seq.slots for seq in self._holders), key=lambda slots: slots.start)
                neighbors = pairwise([range(0), *held, range(self.num_slots, self.num_slots)])
                return [range(left.stop, right.start) for left, right in neighbors]

    class wrong_is_best_fit:
        """Take the smallest free range that is large enough."""

        red = "2 slots each; best fit would take 5 and 6 first"
        unseen = "a static batch begins in an empty pool, which is one range"

        class SlotManager:
            def _first_fit(self, size):
                fits = [slots for slots in self.free_ranges() if len(slots) >= size]
                return min(fits, key=len).start if fits else None

    class wrong_takes_the_first_range:
        """Take the first free range, whatever its length."""

        red = "a piece of 3 slots does not fit into the first 2"
        unseen = "a static batch begins in an empty pool, which is one range"

        class SlotManager:
            def _first_fit(self, size):
                free = self.free_ranges()
                return free[0].start if free and sum(map(len, free)) >= size else None

    class wrong_wants_a_slot_more:
        """A range of exactly the size that is needed counts as too small."""

        red = "slots in a row are free, and have no place"

        class SlotManager:
            def _first_fit(self, size):
                return next((slots.start for slots in self.free_ranges() if len(slots) > size), None)

    class wrong_takes_what_is_there:
        """A sequence that does not fit gets the largest free range."""

        red = "no error was raised"
        unseen = "the engine asks can_allocate() first"

        class SlotManager:
            def allocate(self, seq):
                size = self.num_reserved(seq)
                start = self._first_fit(size)
                if start is None:
                    largest = max(self.free_ranges(), key=len)
                    start, size = largest.start, len(largest)
                seq.slots = range(start, start + size)
                self._holders.add(seq)

    class wrong_keeps_the_slots:
        """The slots are free, and the sequence still has them."""

        red = "a sequence that was freed has no slots"
        unseen = "nothing looks at the slots of a sequence that has ended"

        class SlotManager:
            def free(self, seq):
                self._peak = self.peak
                self._holders.remove(seq)
                self._observer.tell("free", seq, seq.slots)

    class wrong_forgets_the_peak:
        """Nothing remembers how much was held before."""

        red = "12 slots were held before 8 of them were freed"
        unseen = "the peak is in the command's last line, and in no event"

        class SlotManager:
            def free(self, seq):
                self._holders.remove(seq)
                slots, seq.slots = seq.slots, None
                self._observer.tell("free", seq, slots)

    class wrong_tells_nobody:
        """The observer does not hear that slots were freed."""

        red = 'tell("free", seq, slots)'

        class SlotManager:
            def free(self, seq):
                self._peak = self.peak
                self._holders.remove(seq)
                seq.slots = None


class Step2:
    class right_loops:
        """One loop over the tokens fills all lists."""

        class ModelRunner:
            def compute_logits(self, batch):
                ids, positions, slots, starts, contexts = [], [], [], [0], []
                for seq, num_tokens in batch:
                    end = seq.num_computed_tokens + num_tokens
                    for position in range(seq.num_computed_tokens, end):
                        ids.append(seq.token_ids[position])
                        positions.append(position)
                        slots.append(seq.slots[position])
                    starts.append(len(ids))
                    contexts.append(end)
                step = AttentionMetadata(starts, contexts, [seq.slots[0] for seq, _ in batch], self._tensor(slots))
                hidden = self._model(self._tensor(ids), self._tensor(positions), self._attention.plan(step))
                self.num_steps += 1
                self.num_tokens += len(ids)
                return self._model.compute_logits(hidden[[start - 1 for start in starts[1:]]])

    class right_concatenates_tensors:
        """Ranges of positions, and the first slot of a sequence repeated for each of its tokens."""

        class ModelRunner:
            def compute_logits(self, batch):
                spans = [(seq.num_computed_tokens, seq.num_computed_tokens + count) for seq, count in batch]
                counts = self._tensor([count for _, count in batch])
                first_slots = self._tensor([seq.slots.start for seq, _ in batch])
                ends = counts.cumsum(0)
                ids = [i for (seq, _), (start, end) in zip(batch, spans, strict=True) for i in seq.token_ids[start:end]]
                positions = torch.cat([torch.arange(start, end, device=self._device) for start, end in spans])
                step = AttentionMetadata(
                    query_start_loc=[0, *ends.tolist()],
                    context_lens=[end for _, end in spans],
                    first_slots=first_slots.tolist(),
                    slot_mapping=positions + first_slots.repeat_interleave(counts),
                )
                hidden = self._model(self._tensor(ids), positions, self._attention.plan(step))
                self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(ids)
                return self._model.compute_logits(hidden[ends - 1])

    class wrong_counts_positions_from_the_step:
        """The first token of a step has position 0."""

        red = "the positions of a prompt of 3 tokens, then the token at position 5"

        class ModelRunner:
            def compute_logits(self, batch):
                rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
                positions = self._tensor([i for _, num_tokens in batch for i in range(num_tokens)])
                step = AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_computed_tokens + num_tokens for seq, num_tokens in batch],
                    first_slots=[seq.slots.start for seq, _ in batch],
                    slot_mapping=self._tensor([seq.slots.start + position for seq, position in rows]),
                )
                input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])
                hidden = self._model(input_ids, positions, self._attention.plan(step))
                self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
                return self._model.compute_logits(hidden[self._tensor(step.query_start_loc[1:]) - 1])

    class wrong_writes_each_step_to_the_first_slots:
        """The tokens of a step go to the first slots of the sequence, over those of earlier steps."""

        red = "the slots of 3 tokens from slot 10 on, and of position 5 from slot 2 on"

        class ModelRunner:
            def compute_logits(self, batch):
                rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
                positions = self._tensor([position for _, position in rows])
                step = AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_computed_tokens + num_tokens for seq, num_tokens in batch],
                    first_slots=[seq.slots.start for seq, _ in batch],
                    slot_mapping=self._tensor([seq.slots.start + i for seq, count in batch for i in range(count)]),
                )
                input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])
                hidden = self._model(input_ids, positions, self._attention.plan(step))
                self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
                return self._model.compute_logits(hidden[self._tensor(step.query_start_loc[1:]) - 1])

    class wrong_leaves_this_step_out_of_the_context:
        """A token does not see itself."""

        red = "the tokens that each sequence attends to, with those of this step"

        class ModelRunner:
            def compute_logits(self, batch):
                rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
                positions = self._tensor([position for _, position in rows])
                step = AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_computed_tokens for seq, _ in batch],
                    first_slots=[seq.slots.start for seq, _ in batch],
                    slot_mapping=self._tensor([seq.slots.start + position for seq, position in rows]),
                )
                input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])
                hidden = self._model(input_ids, positions, self._attention.plan(step))
                self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
                return self._model.compute_logits(hidden[self._tensor(step.query_start_loc[1:]) - 1])

    class wrong_returns_logits_of_all_tokens:
        """Every token goes through the head."""

        red = "the id and the position of the token that each row of logits is of"

        class ModelRunner:
            def compute_logits(self, batch):
                rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
                positions = self._tensor([position for _, position in rows])
                step = AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_computed_tokens + num_tokens for seq, num_tokens in batch],
                    first_slots=[seq.slots.start for seq, _ in batch],
                    slot_mapping=self._tensor([seq.slots.start + position for seq, position in rows]),
                )
                input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])
                hidden = self._model(input_ids, positions, self._attention.plan(step))
                self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
                return self._model.compute_logits(hidden)

    class wrong_counts_sequences:
        """A step is counted as one token for each sequence."""

        red = "two steps of 4 tokens each"
        unseen = "the count is in the command's last line, and in no event"

        class ModelRunner:
            def compute_logits(self, batch):
                rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
                positions = self._tensor([position for _, position in rows])
                step = AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_computed_tokens + num_tokens for seq, num_tokens in batch],
                    first_slots=[seq.slots.start for seq, _ in batch],
                    slot_mapping=self._tensor([seq.slots.start + position for seq, position in rows]),
                )
                input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])
                hidden = self._model(input_ids, positions, self._attention.plan(step))
                self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(batch)
                return self._model.compute_logits(hidden[self._tensor(step.query_start_loc[1:]) - 1])


class Step3:
    class right_decides_then_finishes:
        """Find the reason first, and finish in one place."""

        class Sequence:
            def append_token(self, token):
                self.token_ids.append(token.token_id)
                self.cumulative_logprob += token.logprob
                self.metrics.first_token_time = self.metrics.first_token_time or time.perf_counter()
                reason = "stop" if token.token_id in self.stop_token_ids else None
                if reason is None and self.decoder is not None:
                    self.text += self.decoder.push(token.token_id)
                if reason is None and self._cut_at_stop_string():
                    reason = "stop"
                if reason is None and len(self.token_ids) == self.max_num_tokens:
                    reason = "length"
                if reason:
                    self.finish(reason)

    class right_reads_character_by_character:
        """Look at each beginning of the text, the shortest first."""

        class Sequence:
            def _cut_at_stop_string(self):
                for end in range(1, len(self.text) + 1):
                    complete = [len(stop) for stop in self.params.stop if self.text[:end].endswith(stop)]
                    if complete:
                        self.text, self.decoder = self.text[: end - max(complete)], None
                        return True
                return False

    class wrong_stops_one_token_late:
        """The length is compared before the token counts."""

        red = "3 sampled tokens, max_tokens is 3"

        class Sequence:
            def append_token(self, token):
                self.token_ids.append(token.token_id)
                self.cumulative_logprob += token.logprob
                self.metrics.first_token_time = self.metrics.first_token_time or time.perf_counter()
                if token.token_id in self.stop_token_ids:
                    self.finish("stop")
                    return
                if self.decoder:
                    self.text += self.decoder.push(token.token_id)
                if self._cut_at_stop_string():
                    self.finish("stop")
                elif self.num_tokens > self.max_num_tokens:
                    self.finish("length")

    class wrong_looks_at_the_length_first:
        """A stop token in the last place is reported as "length"."""

        red = "2 sampled tokens, max_tokens is 2, and the last one is a stop token"
        unseen = "the requests of the page have no stop token"

        class Sequence:
            def append_token(self, token):
                self.token_ids.append(token.token_id)
                self.cumulative_logprob += token.logprob
                self.metrics.first_token_time = self.metrics.first_token_time or time.perf_counter()
                is_stop = token.token_id in self.stop_token_ids
                if self.decoder and not is_stop:
                    self.text += self.decoder.push(token.token_id)
                if self.num_tokens >= self.max_num_tokens:
                    self.finish("length")
                elif is_stop or self._cut_at_stop_string():
                    self.finish("stop")

    class wrong_shows_the_stop_token:
        """The text of a stop token is part of the output."""

        red = "the last token is the stop token 36"
        unseen = "the requests of the page have no stop token"

        class Sequence:
            def append_token(self, token):
                self.token_ids.append(token.token_id)
                self.cumulative_logprob += token.logprob
                self.metrics.first_token_time = self.metrics.first_token_time or time.perf_counter()
                if self.decoder:
                    self.text += self.decoder.push(token.token_id)
                if token.token_id in self.stop_token_ids or self._cut_at_stop_string():
                    self.finish("stop")
                elif self.num_tokens >= self.max_num_tokens:
                    self.finish("length")

    class wrong_forgets_the_logprob:
        """Only the token counts."""

        red = "3 tokens of -0.5 each"
        unseen = "logprobs are in no event"

        class Sequence:
            def append_token(self, token):
                self.token_ids.append(token.token_id)
                self.metrics.first_token_time = self.metrics.first_token_time or time.perf_counter()
                if token.token_id in self.stop_token_ids:
                    self.finish("stop")
                    return
                if self.decoder:
                    self.text += self.decoder.push(token.token_id)
                if self._cut_at_stop_string():
                    self.finish("stop")
                elif self.num_tokens >= self.max_num_tokens:
                    self.finish("length")

    class wrong_notes_each_time:
        """The time of the first token is that of the last one."""

        red = "the second token does not change it"
        unseen = "play compares no times"

        class Sequence:
            def append_token(self, token):
                self.token_ids.append(token.token_id)
                self.cumulative_logprob += token.logprob
                self.metrics.first_token_time = time.perf_counter()
                if token.token_id in self.stop_token_ids:
                    self.finish("stop")
                    return
                if self.decoder:
                    self.text += self.decoder.push(token.token_id)
                if self._cut_at_stop_string():
                    self.finish("stop")
                elif self.num_tokens >= self.max_num_tokens:
                    self.finish("length")

    class wrong_compares_the_end_of_the_text:
        """A stop string counts only where a token ends."""

        red = 'little with the stop strings "ittle" and "tt"'

        class Sequence:
            def _cut_at_stop_string(self):
                for stop in sorted(self.params.stop, key=len, reverse=True):
                    if self.text.endswith(stop):
                        self.text, self.decoder = self.text.removesuffix(stop), None
                        return True
                return False

    class wrong_takes_the_one_that_begins_first:
        """The stop string that begins first may be complete later than another one."""

        red = 'little with the stop strings "ittle" and "tt"'
        unseen = "tokens are compared, and not texts"

        class Sequence:
            def _cut_at_stop_string(self):
                starts = [self.text.index(stop) for stop in self.params.stop if stop in self.text]
                if starts:
                    self.text, self.decoder = self.text[: min(starts)], None
                return bool(starts)

    class wrong_keeps_the_stop_string:
        """The text ends with the stop string."""

        red = 'x-y-- with the stop string "--"'
        unseen = "tokens are compared, and not texts"

        class Sequence:
            def _cut_at_stop_string(self):
                return any(stop in self.text for stop in self.params.stop)

    class wrong_takes_the_shorter_one:
        """Of two stop strings that are complete together, the shorter one cuts."""

        red = 'wx-- with the stop strings "--" and "x--"'
        unseen = "tokens are compared, and not texts"

        class Sequence:
            def _cut_at_stop_string(self):
                starts = [
                    (self.text.index(stop) + len(stop), len(stop)) for stop in self.params.stop if stop in self.text
                ]
                if starts:
                    end, length = min(starts)
                    self.text, self.decoder = self.text[: end - length], None
                return bool(starts)
