"""Solutions and mistakes for the steps of stage 2."""


class Step1:
    class right_checks_then_pops:
        """Check first, then pop and push one block at a time."""

        class BlockPool:
            def get_new_blocks(self, count):
                if count > len(self.free):
                    raise AssertionError(f"asked for {count}, only {len(self.free)} left")
                taken = []
                while len(taken) < count:
                    taken.append(self.free.pop())
                return taken

            def free_blocks(self, blocks):
                for block in blocks[::-1]:
                    self.free.append(block)

        class BlockManager:
            def allocate(self, seq):
                size = self.block_size
                count = (seq.num_tokens + size - 1) // size
                self._holders.add(seq)
                seq.block_table.extend(self.pool.get_new_blocks(count))

    class right_slices_the_stack:
        """Cut the top off the stack, reversed; free() swaps the report before anything else."""

        class BlockPool:
            def get_new_blocks(self, count):
                rest = len(self.free) - count
                assert rest >= 0, (count, len(self.free))
                top = self.free[rest:]
                del self.free[rest:]
                top.reverse()
                return top

            def free_blocks(self, blocks):
                self.free.extend(list(blocks)[::-1])

        class BlockManager:
            def free(self, seq):
                now = self.report()
                if (now.held, now.used) > (self._peak.held, self._peak.used):
                    self._peak = now
                blocks = list(seq.block_table)
                self.pool.free_blocks(blocks)
                seq.block_table.clear()
                self._holders.discard(seq)
                self._observer.tell("free", seq, blocks)

    class right_puts_back_what_it_took:
        """Take first; if the pool runs out, put everything back and then raise."""

        class BlockPool:
            def get_new_blocks(self, count):
                taken = []
                num_free = len(self.free)
                try:
                    for _ in range(count):
                        taken.append(self.free.pop())
                except IndexError:
                    self.free_blocks(taken)
                    raise AssertionError(f"{num_free} blocks are free, not {count}") from None
                return taken

    class wrong_compares_with_the_whole_pool:
        """Compare with the number of blocks that the pool has, and not with those that are free."""

        red = "no error was raised"
        unseen = "promises keep the engine from asking for more blocks than are free"

        class BlockPool:
            def get_new_blocks(self, count):
                left = len(self.free) - count
                assert count <= self.num_blocks, (count, self.num_blocks)
                blocks = self.free[left:][::-1]
                del self.free[left:]
                return blocks

    class wrong_pops_without_a_check:
        """Take blocks until there are none."""

        red = "IndexError: pop from empty list"
        unseen = "promises keep the engine from asking for more blocks than are free"

        class BlockPool:
            def get_new_blocks(self, count):
                return [self.free.pop() for _ in range(count)]

    class wrong_takes_what_is_left:
        """A slice of an empty list raises nothing: the caller gets fewer blocks than it needs."""

        red = "no error was raised"
        unseen = "promises keep the engine from asking for more blocks than are free"

        class BlockPool:
            def get_new_blocks(self, count):
                taken, self.free = self.free[-count:][::-1], self.free[:-count]
                return taken

    class wrong_is_a_queue:
        """Freed blocks go to the bottom of the stack."""

        red = "now 3 is on top, then 0, 1, 4"
        unseen = "any free block serves: play says that the blocks are others, and that this is fine"

        class BlockPool:
            def free_blocks(self, blocks):
                self.free = [*blocks, *self.free]

    class wrong_reserves_the_maximum_length:
        """Blocks for prompt + max_tokens, as stage 1 reserves slots."""

        red = "blocks needed: 13, free: 4"

        class BlockManager:
            def allocate(self, seq):
                seq.block_table = self.pool.get_new_blocks(cdiv(seq.max_num_tokens, self.block_size))
                self._holders.add(seq)

    class wrong_rounds_down:
        """A block that is not full is forgotten."""

        red = "a prompt of length 1 fills 1"

        class BlockManager:
            def allocate(self, seq):
                seq.block_table = self.pool.get_new_blocks(seq.num_tokens // self.block_size)
                self._holders.add(seq)

    class wrong_forgets_the_holder:
        """The manager does not know that the sequence holds blocks."""

        red = "a block is in two places or in none"

        class BlockManager:
            def allocate(self, seq):
                seq.block_table = self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size))

    class wrong_keeps_the_table:
        """The blocks go back to the pool, and stay in the table."""

        red = "a sequence that was freed has an empty table"
        unseen = "nothing looks at the table of a sequence that has ended"

        class BlockManager:
            def free(self, seq):
                self._peak = self.peak
                self._holders.remove(seq)
                self.pool.free_blocks(seq.block_table)
                self._observer.tell("free", seq, seq.block_table)

    class wrong_keeps_the_holder:
        """The manager still counts a sequence that was freed."""

        red = "report() still counts blocks that were promised to them"

        class BlockManager:
            def free(self, seq):
                self._peak = self.peak
                blocks, seq.block_table = seq.block_table, []
                self.pool.free_blocks(blocks)
                self._observer.tell("free", seq, blocks)

    class wrong_forgets_the_peak:
        """Nothing remembers how much was held before."""

        red = "3 blocks were held before a was freed"
        unseen = "the peak is in the command's last line, and in no event"

        class BlockManager:
            def free(self, seq):
                self._holders.remove(seq)
                blocks, seq.block_table = seq.block_table, []
                self.pool.free_blocks(blocks)
                self._observer.tell("free", seq, blocks)


class Step2:
    class right_compares_lengths:
        """Compare the length of the table with the length that it must have."""

        class BlockManager:
            def can_promise(self, seq):
                promised = sum(self.num_promised(holder) for holder in self._holders)
                return promised + self.num_promised(seq) <= self.num_blocks

            def append_slot(self, seq):
                while len(seq.block_table) < cdiv(seq.num_tokens, self.block_size):
                    seq.block_table.extend(self.pool.get_new_blocks(1))
                    self._observer.tell("grow", seq)

    class right_asks_for_the_last_position:
        """The last token needs entry position // block_size of the table."""

        class BlockManager:
            def can_promise(self, seq):
                return not self.num_unpromised_blocks < self.num_promised(seq)

            def append_slot(self, seq):
                position = seq.num_tokens - 1
                if position // self.block_size == len(seq.block_table):
                    [block] = self.pool.get_new_blocks(1)
                    seq.block_table.append(block)
                    self._observer.tell("grow", seq)

    class wrong_grows_too_early:
        """A block is taken when the last one is exactly full."""

        red = "a sequence of length 4 holds 1"

        class BlockManager:
            def append_slot(self, seq):
                if seq.num_tokens >= len(seq.block_table) * self.block_size:
                    seq.block_table += self.pool.get_new_blocks(1)
                    self._observer.tell("grow", seq)

    class wrong_looks_at_the_token_alone:
        """The first token of a block always takes one, even a prompt's that has its block already."""

        red = "a sequence of length 5 holds 2"

        class BlockManager:
            def append_slot(self, seq):
                if (seq.num_tokens - 1) % self.block_size == 0:
                    seq.block_table += self.pool.get_new_blocks(1)
                    self._observer.tell("grow", seq)

    class wrong_counts_free_blocks:
        """Free blocks are given away twice: some of them are promised."""

        red = "3 are free, but 2 of them are promised to a"

        class BlockManager:
            def can_promise(self, seq):
                return self.num_promised(seq) <= len(self.pool.free)

    class wrong_promises_the_prompt:
        """The tokens that will be generated are not counted."""

        red = "of 4 free blocks, a may need 3 (for 9 tokens), b 5 (for 17)"

        class BlockManager:
            def can_promise(self, seq):
                return cdiv(seq.num_tokens, self.block_size) <= self.num_unpromised_blocks

    class wrong_tells_nobody:
        """The observer does not hear that the sequence grew."""

        red = 'tell("grow", seq) for the 5th token and the 9th'

        class BlockManager:
            def append_slot(self, seq):
                if seq.num_tokens > len(seq.block_table) * self.block_size:
                    seq.block_table += self.pool.get_new_blocks(1)


class Step3:
    class right_stacks_keys_and_values:
        """One indexed assignment for keys and values, one gather for both."""

        class ModelRunner:
            def _slot(self, seq, position):
                index, offset = divmod(position, self._block_size)
                return seq.block_table[index] * self._block_size + offset

        class KVCache:
            def write(self, layer, slot_mapping, k, v):
                block = slot_mapping.div(self.block_size, rounding_mode="floor")
                self.blocks[block, layer, :, slot_mapping % self.block_size] = torch.stack((k, v), dim=1)

            def read(self, layer, block_table, length):
                gathered = self.blocks[block_table, layer].transpose(0, 1).flatten(1, 2)
                return gathered[0, :length], gathered[1, :length]

    class right_loops:
        """Token by token and block by block, in plain Python."""

        class KVCache:
            def write(self, layer, slot_mapping, k, v):
                for i, slot in enumerate(slot_mapping.tolist()):
                    self.blocks[slot // self.block_size, layer, 0, slot % self.block_size] = k[i]
                    self.blocks[slot // self.block_size, layer, 1, slot % self.block_size] = v[i]

            def read(self, layer, block_table, length):
                keys = torch.cat([self.blocks[block, layer, 0] for block in block_table.tolist()])
                values = torch.cat([self.blocks[block, layer, 1] for block in block_table.tolist()])
                return keys[:length], values[:length]

    class right_reads_slot_by_slot:
        """Work out the slots of the table, and index by block and offset."""

        class KVCache:
            def read(self, layer, block_table, length):
                positions = torch.arange(length, device=block_table.device)
                block, offset = block_table[positions // self.block_size], positions % self.block_size
                return self.blocks[block, layer, 0, offset], self.blocks[block, layer, 1, offset]

    class wrong_ignores_the_table:
        """Slots in order from the first block, as in stage 1."""

        red = "the slots of tokens 0 to 5 of a sequence in blocks 3 and 0"

        class ModelRunner:
            def _slot(self, seq, position):
                return seq.block_table[0] * self._block_size + position

    class wrong_swaps_block_and_offset:
        """Division and remainder the wrong way around."""

        red = "the key of token 0 is not in block 3, offset 1, layer 0"

        class KVCache:
            def write(self, layer, slot_mapping, k, v):
                offset, block = slot_mapping // self.block_size, slot_mapping % self.block_size
                self.blocks[block, layer, 0, offset] = k
                self.blocks[block, layer, 1, offset] = v

    class wrong_writes_keys_twice:
        """The values are keys."""

        red = "the value of token 0 is not in block 3, offset 1, layer 0"

        class KVCache:
            def write(self, layer, slot_mapping, k, v):
                block, offset = slot_mapping // self.block_size, slot_mapping % self.block_size
                self.blocks[block, layer, 0, offset] = k
                self.blocks[block, layer, 1, offset] = k

    class wrong_reads_whole_blocks:
        """The empty slots of the last block are read too."""

        red = "read() of blocks 5, 0, 3 and length 1 returns 12 keys"

        class KVCache:
            def read(self, layer, block_table, length):
                keys, values = self.blocks[block_table, layer].unbind(dim=1)
                return keys.flatten(0, 1), values.flatten(0, 1)

    class wrong_reads_in_the_order_of_the_pool:
        """The blocks are gathered by number, not in the order of the text."""

        red = "read() of blocks 5, 0, 3 and length 1: key 0 is not that of token 0"

        class KVCache:
            def read(self, layer, block_table, length):
                blocks = self.blocks[block_table.sort().values, layer]
                return blocks[:, 0].flatten(0, 1)[:length], blocks[:, 1].flatten(0, 1)[:length]
