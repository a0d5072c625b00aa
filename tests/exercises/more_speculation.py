"""Solutions and mistakes for the steps of the branch more_speculation."""


class Step1:
    class right_looks_for_each_start:
        """Compare at each start, with the tokens as a tuple."""

        def propose(token_ids, suffix_len, max_tokens):
            tokens, size = tuple(token_ids), suffix_len
            for start in range(len(tokens) - size):
                if tokens[start : start + size] == tokens[len(tokens) - size :]:
                    return list(tokens[start + size : start + size + max_tokens])
            return []

    class right_asks_next:
        """Take the first of all ends that match."""

        def propose(token_ids, suffix_len, max_tokens):
            ends = range(suffix_len, len(token_ids))
            is_match = (end for end in ends if token_ids[end - suffix_len : end] == token_ids[-suffix_len:])
            end = next(is_match, len(token_ids))
            return token_ids[end:][:max_tokens]

    class wrong_finds_itself:
        """Let the last tokens match themselves, and guess nothing."""

        red = "A draft is what followed the last tokens before"

        def propose(token_ids, suffix_len, max_tokens):
            for end in range(len(token_ids), suffix_len - 1, -1):
                if token_ids[end - suffix_len : end] == token_ids[-suffix_len:]:
                    return token_ids[end : end + max_tokens]
            return []

    class wrong_takes_the_latest:
        """Take the latest occurrence in place of the first."""

        red = "The first occurrence counts"

        def propose(token_ids, suffix_len, max_tokens):
            for end in range(len(token_ids) - 1, suffix_len - 1, -1):
                if token_ids[end - suffix_len : end] == token_ids[-suffix_len:]:
                    return token_ids[end : end + max_tokens]
            return []

    class wrong_has_no_limit:
        """Guess everything that followed."""

        red = "A draft has at most max tokens"

        def propose(token_ids, suffix_len, max_tokens):
            for end in range(suffix_len, len(token_ids)):
                if token_ids[end - suffix_len : end] == token_ids[-suffix_len:]:
                    return token_ids[end:]
            return []


class Step2:
    class right_counts_the_missing_blocks:
        """Count the blocks that are missing, and take as many of the uncached ones."""

        class BlockManager:
            def append_draft_slots(self, seq, num_tokens):
                missing = cdiv(seq.num_tokens + num_tokens, self.block_size) - len(seq.block_table)
                for _ in range(missing):
                    if self.pool.has_uncached_block:
                        seq.block_table.append(self.pool.get_new_blocks(1)[0])
                        self._observer.tell("grow", seq, None)
                num_slots = len(seq.block_table) * self.block_size - seq.num_tokens
                return num_tokens if num_tokens < num_slots else num_slots

            def trim(self, seq):
                extra = []
                while (len(seq.block_table) - 1) * self.block_size >= seq.num_tokens:
                    extra.insert(0, seq.block_table.pop())
                if extra:
                    self.pool.free_blocks(extra)
                    self._observer.tell("trim", seq, extra)

    class right_drafts_with_early_returns:
        """Return early where there is nothing to draft."""

        class Scheduler:
            def _draft(self, seq, num_tokens, output):
                if num_tokens != seq.num_uncomputed_tokens or output.budget == 0:
                    return 0
                left = seq.max_num_tokens - seq.num_tokens
                draft = propose(seq.token_ids, self._suffix_len, self._num_speculative_tokens)[: left - 1]
                draft = draft[: output.budget]
                if not draft:
                    return 0
                num_slots = self._kv_cache_manager.append_draft_slots(seq, len(draft))
                seq.draft_token_ids = draft[:num_slots]
                output.budget -= num_slots
                return num_slots

    class wrong_evicts_for_a_guess:
        """Take any free block, even a cached one."""

        red = "A draft takes no block that a hash names"

        class BlockManager:
            def append_draft_slots(self, seq, num_tokens):
                while self.num_free_blocks and seq.num_tokens + num_tokens > len(seq.block_table) * self.block_size:
                    seq.block_table += self.pool.get_new_blocks(1)
                    self._observer.tell("grow", seq, None)
                return min(num_tokens, len(seq.block_table) * self.block_size - seq.num_tokens)

    class wrong_keeps_the_blocks:
        """Give nothing back: the blocks may be needed for the next draft."""

        red = "Blocks that only a draft has needed are given back"

        class BlockManager:
            def trim(self, seq):
                pass

    class wrong_trims_the_last_block_too:
        """Keep only the blocks that are full."""

        red = "Accepted tokens keep their blocks"

        class BlockManager:
            def trim(self, seq):
                num_blocks = seq.num_tokens // self.block_size
                seq.block_table, blocks = seq.block_table[:num_blocks], seq.block_table[num_blocks:]
                self.pool.free_blocks(blocks)
                if blocks:
                    self._observer.tell("trim", seq, blocks)

    class wrong_drafts_before_the_prompt_is_computed:
        """Draft for every sequence in the step."""

        red = "A prompt that a step does not complete has none"

        class Scheduler:
            def _draft(self, seq, num_tokens, output):
                longest = min(self._num_speculative_tokens, seq.max_num_tokens - seq.num_tokens - 1)
                draft = propose(seq.token_ids, self._suffix_len, longest)
                seq.draft_token_ids = draft[: self._kv_cache_manager.append_draft_slots(seq, len(draft))]
                return len(seq.draft_token_ids)

    class wrong_guesses_the_last_token_too:
        """Draft up to max_num_tokens, where the last token needs no row of its own."""

        red = "A draft leaves room for the token after it"

        class Scheduler:
            def _draft(self, seq, num_tokens, output):
                if num_tokens < seq.num_uncomputed_tokens:
                    return 0
                longest = min(self._num_speculative_tokens, output.budget, seq.max_num_tokens - seq.num_tokens)
                draft = propose(seq.token_ids, self._suffix_len, longest)
                seq.draft_token_ids = draft[: self._kv_cache_manager.append_draft_slots(seq, len(draft))]
                output.budget -= len(seq.draft_token_ids)
                return len(seq.draft_token_ids)


class Step3:
    class right_counts_rows_from_the_ends:
        """Work with the first row of each sequence, and fill lists in order."""

        class Sequence:
            def next_token_ids(self, num_tokens):
                text = [*self.token_ids, *self.draft_token_ids]
                return text[self.num_computed_tokens : self.num_computed_tokens + num_tokens]

        class ModelRunner:
            def compute_logits(self, batch):
                rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
                token_ids, wanted = [], []
                for seq, num_tokens in batch:
                    token_ids += seq.next_token_ids(num_tokens)
                    wanted += range(len(token_ids) - 1 - len(seq.draft_token_ids), len(token_ids))
                step = self._metadata(batch, rows)
                positions = self._tensor([position for _, position in rows])
                hidden = self._model(self._tensor(token_ids), positions, self._attention.plan(step))
                self.num_steps += 1
                self.num_tokens += len(token_ids)
                return self._model.compute_logits(hidden[self._tensor(wanted)])

            def run(self, batch):
                logits, row, result = self.compute_logits(batch), 0, []
                for seq, num_tokens in batch:
                    count = 1 + len(seq.draft_token_ids)
                    tokens = []
                    if num_tokens >= seq.num_uncomputed_tokens:
                        tokens = sample(logits[row : row + count], [seq.sampling_row(ahead) for ahead in range(count)])
                    result.append(tokens)
                    row += count
                return result

    class right_samples_all_rows:
        """Sample every row, and drop those of sequences that are not complete."""

        class ModelRunner:
            def run(self, batch):
                logits = self.compute_logits(batch)
                owners = [seq for seq, _ in batch for _ in range(1 + len(seq.draft_token_ids))]
                aheads = [ahead for seq, _ in batch for ahead in range(1 + len(seq.draft_token_ids))]
                tokens = sample(logits, [seq.sampling_row(i) for seq, i in zip(owners, aheads, strict=True)])
                result = []
                for seq, num_tokens in batch:
                    mine = [token for owner, token in zip(owners, tokens, strict=True) if owner is seq]
                    result.append(mine if num_tokens >= seq.num_uncomputed_tokens else [])
                return result

    class wrong_has_only_the_last_row:
        """Compute the logits after the draft, as for any chunk."""

        red = "The last token and each token of the draft have logits"

        class ModelRunner:
            def compute_logits(self, batch):
                rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
                input_ids = self._tensor([token for seq, num in batch for token in seq.next_token_ids(num)])
                positions = self._tensor([position for _, position in rows])
                step = self._metadata(batch, rows)
                hidden = self._model(input_ids, positions, self._attention.plan(step))
                self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
                return self._model.compute_logits(hidden[self._tensor(step.query_start_loc[1:]) - 1])

    class wrong_draws_with_one_noise:
        """Draw every row as the token after the last one."""

        red = "A draft of the tokens that a seed draws one by one is right to its end"

        class ModelRunner:
            def run(self, batch):
                logits = self.compute_logits(batch)
                rows = [(seq, num) for seq, num in batch for _ in range(len(seq.draft_token_ids) + 1)]
                tokens = {seq: [] for seq, _ in batch}
                sampled = sample(logits, [seq.sampling_row() for seq, _ in rows])
                for (seq, num), token in zip(rows, sampled, strict=True):
                    if num >= seq.num_uncomputed_tokens:
                        tokens[seq].append(token)
                return list(tokens.values())

    class wrong_samples_in_the_middle_of_a_prompt:
        """Return a token for each sequence, complete or not."""

        red = "A sequence with more tokens to compute gets none"

        class ModelRunner:
            def run(self, batch):
                logits = self.compute_logits(batch)
                rows = [(seq, ahead) for seq, _ in batch for ahead in range(len(seq.draft_token_ids) + 1)]
                tokens = {seq: [] for seq, _ in batch}
                for (seq, _), token in zip(rows, sample(logits, [s.sampling_row(i) for s, i in rows]), strict=True):
                    tokens[seq].append(token)
                return list(tokens.values())


class Step4:
    class right_counts_first:
        """Count how many guesses are right, and append as many tokens and one more."""

        class Sequence:
            def append_tokens(self, tokens):
                draft, self.draft_token_ids, num_accepted = self.draft_token_ids, [], 0
                if not tokens:
                    return 0
                for token, guess in zip(tokens, draft, strict=False):
                    self.append_token(token)
                    if self.finished or token.token_id != guess:
                        return num_accepted
                    num_accepted += 1
                self.append_token(tokens[num_accepted])
                return num_accepted

    class right_subtracts_wrong_guesses:
        """Count what was wrong."""

        class LLMEngine:
            def _update(self, batch, tokens):
                updated = []
                for (seq, num_tokens), new_tokens in zip(batch, tokens, strict=True):
                    draft = list(seq.draft_token_ids)
                    num_accepted = seq.append_tokens(new_tokens)
                    num_wrong = len(draft) - num_accepted
                    seq.num_computed_tokens += num_tokens - num_wrong
                    self.kv_cache_manager.cache_blocks(seq, num_tokens - num_wrong)
                    self.kv_cache_manager.trim(seq)
                    self.num_draft_tokens += len(draft)
                    self.num_accepted_tokens += num_accepted
                    if draft:
                        self.observer.tell("verify", seq, len(draft), num_accepted)
                    if new_tokens:
                        updated.append(seq)
                self.observer.tell("step", batch, updated)
                for seq in updated:
                    if seq.finished:
                        self.scheduler.remove(seq)
                return updated

    class wrong_believes_the_draft:
        """Append the guesses in place of what was sampled."""

        red = "Tokens are appended up to the first wrong guess"

        class Sequence:
            def append_tokens(self, tokens):
                draft, self.draft_token_ids = self.draft_token_ids, []
                for token in tokens:
                    self.append_token(token)
                return len(draft)

    class wrong_goes_on_after_the_end:
        """Append all that is right, even after a stop token."""

        red = "A stop token within a right draft ends the sequence"

        class Sequence:
            def append_tokens(self, tokens):
                draft, self.draft_token_ids = self.draft_token_ids, []
                for num_accepted, token in enumerate(tokens):
                    self.append_token(token)
                    if draft[num_accepted : num_accepted + 1] != [token.token_id]:
                        return num_accepted
                return 0

    class wrong_counts_every_guess_as_computed:
        """Leave the count of computed tokens as it was in stage 7."""

        red = "Wrong guesses are not computed and hold nothing"

        class LLMEngine:
            def _update(self, batch, tokens):
                updated = []
                for (seq, num_tokens), new_tokens in zip(batch, tokens, strict=True):
                    num_drafted = len(seq.draft_token_ids)
                    seq.num_computed_tokens += num_tokens
                    self.num_draft_tokens += num_drafted
                    self.num_accepted_tokens += seq.append_tokens(new_tokens)
                    self.kv_cache_manager.cache_blocks(seq, num_tokens)
                    self.kv_cache_manager.trim(seq)
                    if new_tokens:
                        updated.append(seq)
                for seq in updated:
                    if seq.finished:
                        self.scheduler.remove(seq)
                return updated

    class wrong_forgets_to_trim:
        """Leave the blocks of wrong guesses in the table."""

        red = "blocks for 15 tokens"

        class LLMEngine:
            def _update(self, batch, tokens):
                updated = []
                for (seq, num_tokens), new_tokens in zip(batch, tokens, strict=True):
                    num_drafted = len(seq.draft_token_ids)
                    num_accepted = seq.append_tokens(new_tokens)
                    num_valid = num_tokens - num_drafted + num_accepted
                    seq.num_computed_tokens += num_valid
                    self.kv_cache_manager.cache_blocks(seq, num_valid)
                    self.num_draft_tokens += num_drafted
                    self.num_accepted_tokens += num_accepted
                    if new_tokens:
                        updated.append(seq)
                for seq in updated:
                    if seq.finished:
                        self.scheduler.remove(seq)
                return updated
