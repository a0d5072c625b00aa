"""Solutions and mistakes for the steps of stage 5."""


class Step1:
    class right_counts_one_block_at_a_time:
        """Plain loops, and the list of free blocks rebuilt in one piece."""

        class BlockPool:
            def get_new_blocks(self, count):
                assert count <= len(self.free), f"blocks needed: {count}, free: {len(self.free)}"
                blocks = []
                while len(blocks) < count:
                    block = self.free.pop()
                    self.ref_counts[block] += 1
                    blocks.append(block)
                return blocks

            def touch(self, blocks):
                for block in blocks:
                    self.ref_counts[block] += 1

            def free_blocks(self, blocks):
                for block in blocks:
                    self.ref_counts[block] -= 1
                self.free += [block for block in reversed(blocks) if self.ref_counts[block] == 0]

        class BlockManager:
            def fork(self, parent, child):
                child.block_table = []
                for i, block in enumerate(parent.block_table):
                    if i * self.block_size < parent.num_computed_tokens:
                        child.block_table.append(block)
                self.pool.touch(child.block_table)
                child.num_computed_tokens = parent.num_computed_tokens
                self._holders.add(child)
                self._observer.tell("fork", parent, child)

    class right_slices:
        """Take from the end of the list in one slice; free a copy of the list."""

        class BlockPool:
            def get_new_blocks(self, count):
                if count > len(self.free):
                    raise ValueError(f"blocks needed: {count}, free: {len(self.free)}")
                start = len(self.free) - count
                blocks, self.free[start:] = self.free[start:][::-1], []
                for block in blocks:
                    assert self.ref_counts[block] == 0
                    self.ref_counts[block] = 1
                return blocks

            def touch(self, blocks):
                assert all(self.ref_counts[block] for block in blocks)
                self.ref_counts = [count + (block in blocks) for block, count in enumerate(self.ref_counts)]

            def free_blocks(self, blocks):
                for block in list(blocks)[::-1]:
                    if self.ref_counts[block] == 1:
                        self.free.append(block)
                    self.ref_counts[block] = self.ref_counts[block] - 1

        class BlockManager:
            def fork(self, parent, child):
                self._holders.add(child)
                num_blocks, rest = divmod(parent.num_computed_tokens, self.block_size)
                child.block_table = parent.block_table[: num_blocks + bool(rest)]
                child.num_computed_tokens = parent.num_computed_tokens
                self.pool.touch(child.block_table)
                self._observer.tell("fork", parent, child)

    class wrong_shares_the_table:
        """Child and parent have one list."""

        red = "in which nothing is computed"

        class BlockManager:
            def fork(self, parent, child):
                child.block_table = parent.block_table
                child.num_computed_tokens = parent.num_computed_tokens
                self.pool.touch(child.block_table)
                self._holders.add(child)
                self._observer.tell("fork", parent, child)

    class wrong_counts_no_holder:
        """The fork copies the table and adds no holder."""

        red = "reference counts are"

        class BlockManager:
            def fork(self, parent, child):
                child.block_table = parent.block_table[: cdiv(parent.num_computed_tokens, self.block_size)]
                child.num_computed_tokens = parent.num_computed_tokens
                self._holders.add(child)
                self._observer.tell("fork", parent, child)

    class wrong_is_no_holder:
        """The manager doesn't know that the child holds blocks."""

        red = "is the child a holder?"

        class BlockManager:
            def fork(self, parent, child):
                child.block_table = parent.block_table[: cdiv(parent.num_computed_tokens, self.block_size)]
                child.num_computed_tokens = parent.num_computed_tokens
                self.pool.touch(child.block_table)
                self._observer.tell("fork", parent, child)

    class wrong_frees_at_once:
        """The first holder that frees a block gives it away."""

        red = "free blocks are"

        class BlockPool:
            def free_blocks(self, blocks):
                for block in reversed(blocks):
                    self.ref_counts[block] -= 1
                    self.free.append(block)

    class wrong_frees_a_table_from_its_beginning:
        """The last block of the table ends up on top of the stack."""

        red = "are taken as [5, 0, 6]"
        unseen = "any free block serves: play says that the blocks are others, and that this is fine"

        class BlockPool:
            def free_blocks(self, blocks):
                for block in blocks:
                    self.ref_counts[block] -= 1
                    if self.ref_counts[block] == 0:
                        self.free.append(block)

    class wrong_computes_nothing_for_the_child:
        """The child has the blocks, and still takes its tokens for uncomputed."""

        red = "the child counts 0 tokens as computed"

        class BlockManager:
            def fork(self, parent, child):
                child.block_table = list(parent.block_table)
                self.pool.touch(child.block_table)
                self._holders.add(child)
                self._observer.tell("fork", parent, child)

    class wrong_shares_empty_blocks:
        """The child also holds the blocks that the parent has yet to fill."""

        red = "nothing is computed"

        class BlockManager:
            def fork(self, parent, child):
                child.block_table = list(parent.block_table)
                child.num_computed_tokens = parent.num_computed_tokens
                self.pool.touch(child.block_table)
                self._holders.add(child)
                self._observer.tell("fork", parent, child)


class Step2:
    class right_asks_each_question_once:
        """One branch for each of the three cases."""

        class BlockManager:
            def can_append(self, seq):
                if self._needs_block(seq) or self._is_shared(seq):
                    return self.num_free_blocks > 0
                return True

            def append_slot(self, seq):
                if self._needs_block(seq):
                    seq.block_table.append(self.pool.get_new_blocks(1)[0])
                    self._observer.tell("grow", seq, None)
                    return None
                if not self._is_shared(seq):
                    return None
                source = seq.block_table.pop()
                seq.block_table += self.pool.get_new_blocks(1)
                self.pool.free_blocks([source])
                copy = BlockCopy(source, seq.block_table[-1])
                self._observer.tell("grow", seq, copy)
                return copy

    class right_counts_by_itself:
        """Look at the slots and at the counts, without the two helpers."""

        class BlockManager:
            def can_append(self, seq):
                num_slots = len(seq.block_table) * self.block_size
                writes_in_place = seq.num_tokens <= num_slots and self.pool.ref_counts[seq.block_table[-1]] == 1
                return bool(writes_in_place or self.pool.free)

            def append_slot(self, seq):
                index = (seq.num_tokens - 1) // self.block_size
                if index < len(seq.block_table) and self.pool.ref_counts[seq.block_table[index]] == 1:
                    return None
                new = self.pool.get_new_blocks(1)[0]
                if index == len(seq.block_table):
                    seq.block_table.append(new)
                    copy = None
                else:
                    copy = BlockCopy(seq.block_table[index], new)
                    self.pool.ref_counts[copy.source] -= 1
                    seq.block_table[index] = new
                self._observer.tell("grow", seq, copy)
                return copy

    class wrong_never_copies:
        """Stage 4's append_slot(): whoever writes last destroys the others' keys."""

        red = "a and b need a copy of block"

        class BlockManager:
            def append_slot(self, seq):
                if self._needs_block(seq):
                    seq.block_table += self.pool.get_new_blocks(1)
                    self._observer.tell("grow", seq, None)

    class wrong_holds_on_to_the_old_block:
        """The writer never lets go of the block that it has copied, so the last one copies too."""

        red = "only c holds block"

        class BlockManager:
            def append_slot(self, seq):
                copy = None
                if self._needs_block(seq):
                    seq.block_table += self.pool.get_new_blocks(1)
                elif self._is_shared(seq):
                    [target] = self.pool.get_new_blocks(1)
                    copy = BlockCopy(seq.block_table[-1], target)
                    seq.block_table[-1] = target
                else:
                    return None
                self._observer.tell("grow", seq, copy)
                return copy

    class wrong_returns_the_copy_turned_round:
        """Source and target are swapped."""

        red = "is the source"

        class BlockManager:
            def append_slot(self, seq):
                copy = None
                if self._needs_block(seq):
                    seq.block_table += self.pool.get_new_blocks(1)
                elif self._is_shared(seq):
                    old = seq.block_table[-1]
                    [new] = self.pool.get_new_blocks(1)
                    copy = BlockCopy(new, old)
                    self.pool.free_blocks([old])
                    seq.block_table[-1] = new
                else:
                    return None
                self._observer.tell("grow", seq, copy)
                return copy

    class wrong_forgets_that_a_copy_needs_a_block:
        """can_append() is stage 4's."""

        red = "both need a block, and none is free"

        class BlockManager:
            def can_append(self, seq):
                return not self._needs_block(seq) or self.num_free_blocks > 0


class Step3:
    class right_assigns_by_index:
        """One assignment; samples are put behind one at a time."""

        class KVCache:
            def copy_blocks(self, copies):
                if not copies:
                    return
                self.blocks[[copy.target for copy in copies]] = self.blocks[[copy.source for copy in copies]]
                self.num_blocks_copied += len(copies)

        class Scheduler:
            def _take(self, seq, output):
                num_tokens = seq.num_uncomputed_tokens
                if seq.to_fork:
                    num_tokens -= 1
                num_tokens = min(num_tokens, output.budget)
                if num_tokens > 0:
                    copy = self._kv_cache_manager.append_slot(seq)
                    if copy is not None:
                        output.copies.append(copy)
                    output.batch.append((seq, num_tokens))
                    output.budget -= num_tokens

            def _fork_samples(self, seq):
                samples = []
                if seq.num_uncomputed_tokens == 1:
                    index = self.running.index(seq)
                    while seq.to_fork:
                        sample = seq.to_fork.pop(0)
                        self._kv_cache_manager.fork(seq, sample)
                        samples.append(sample)
                        index += 1
                        self.running.insert(index, sample)
                return samples

    class right_copies_one_block_at_a_time:
        """A loop of copy_(): no block is both a source and a target in a step."""

        class KVCache:
            def copy_blocks(self, copies):
                for source, target in copies:
                    self.blocks[target].copy_(self.blocks[source])
                    self.num_blocks_copied += 1

        class Scheduler:
            def _fork_samples(self, seq):
                if seq.num_uncomputed_tokens > 1:
                    return []
                samples = list(seq.to_fork)
                seq.to_fork.clear()
                for sample in samples:
                    self._kv_cache_manager.fork(seq, sample)
                place = self.running.index(seq) + 1
                self.running = self.running[:place] + samples + self.running[place:]
                return samples

    class wrong_copies_only_the_first_layer:
        """The keys and values of the other layers stay as they were."""

        red = "of layer 1 differ"

        class KVCache:
            def copy_blocks(self, copies):
                for source, target in copies:
                    self.blocks[target, 0] = self.blocks[source, 0]
                    self.num_blocks_copied += 1

    class wrong_counts_calls:
        """num_blocks_copied grows by one for each step."""

        red = "three blocks were copied"
        unseen = "the count is in the command's last line, and in no event"

        class KVCache:
            def copy_blocks(self, copies):
                for source, target in copies:
                    self.blocks[target] = self.blocks[source]
                self.num_blocks_copied += bool(copies)

    class wrong_computes_the_whole_prompt_for_all:
        """The first sample computes the last token, too, before the fork."""

        red = "nothing left to compute"

        class Scheduler:
            def _take(self, seq, output):
                num_tokens = min(seq.num_uncomputed_tokens, output.budget)
                if num_tokens == 0:
                    return
                copy = self._kv_cache_manager.append_slot(seq)
                if copy:
                    output.copies.append(copy)
                output.batch.append((seq, num_tokens))
                output.budget -= num_tokens

    class wrong_puts_samples_at_the_end:
        """The samples stand behind requests that came later."""

        red = "not in order of arrival"

        class Scheduler:
            def _fork_samples(self, seq):
                if not seq.to_fork or seq.num_uncomputed_tokens > 1:
                    return []
                samples, seq.to_fork = seq.to_fork, []
                for sample in samples:
                    self._kv_cache_manager.fork(seq, sample)
                self.running += samples
                return samples

    class wrong_forks_one_token_early:
        """A prompt that lacks two tokens is forked, and both samples compute the two."""

        red = "two tokens are left"

        class Scheduler:
            def _fork_samples(self, seq):
                if not seq.to_fork or seq.num_uncomputed_tokens > 2:
                    return []
                samples, seq.to_fork = seq.to_fork, []
                behind = self.running.index(seq) + 1
                self.running[behind:behind] = samples
                for sample in samples:
                    self._kv_cache_manager.fork(seq, sample)
                return samples

    class wrong_turns_the_samples_round:
        """Each sample is put before the one that came before it."""

        red = "a's samples [0, 2, 1], not [0, 1, 2]"

        class Scheduler:
            def _fork_samples(self, seq):
                if not seq.to_fork or seq.num_uncomputed_tokens > 1:
                    return []
                samples, seq.to_fork = seq.to_fork, []
                for sample in samples:
                    self.running.insert(self.running.index(seq) + 1, sample)
                    self._kv_cache_manager.fork(seq, sample)
                return samples

    class wrong_loses_the_copies:
        """_take() makes room for a copy that no step ever makes."""

        red = "keys and values that are not its own"

        class Scheduler:
            def _take(self, seq, output):
                num_tokens = min(seq.num_uncomputed_tokens - bool(seq.to_fork), output.budget)
                if num_tokens:
                    self._kv_cache_manager.append_slot(seq)
                    output.batch.append((seq, num_tokens))
                    output.budget -= num_tokens
