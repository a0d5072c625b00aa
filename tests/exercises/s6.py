"""Solutions and mistakes for the steps of stage 6."""


class Step1:
    class right_hashes_with_sha256:
        """Use all 32 bytes of a SHA-256 digest, of ids as text with separators."""

        def hash_block_tokens(parent, token_ids):
            text = ",".join(str(token) for token in token_ids)
            return hashlib.sha256(parent + b"|" + text.encode()).digest()

        def extend_block_hashes(hashes, token_ids, block_size):
            while (len(hashes) + 1) * block_size <= len(token_ids):
                start = len(hashes) * block_size
                parent = hashes[-1] if hashes else b""
                hashes.append(hash_block_tokens(parent, token_ids[start : start + block_size]))

    class right_names_blocks_by_tuples:
        """Use no digest: the name of a block is a tuple of its parent's name and its tokens."""

        def hash_block_tokens(parent, token_ids):
            return (parent, tuple(token_ids))

        def extend_block_hashes(hashes, token_ids, block_size):
            num_full = len(token_ids) // block_size
            for i in range(len(hashes), num_full):
                parent = hashes[i - 1] if i > 0 else b""
                hashes.append(hash_block_tokens(parent, token_ids[i * block_size : (i + 1) * block_size]))

    class right_hashes_to_a_string:
        """Use a hex digest, which begins with an empty string, and hash all blocks again each time."""

        def hash_block_tokens(parent, token_ids):
            return hashlib.blake2b(f"{parent} {token_ids}".encode()).hexdigest()

        def extend_block_hashes(hashes, token_ids, block_size):
            parent, renewed = "", []
            for start in range(0, len(token_ids) - block_size + 1, block_size):
                parent = hash_block_tokens(parent, token_ids[start : start + block_size])
                renewed.append(parent)
            hashes[:] = renewed

    class wrong_leaves_out_the_parent:
        """Hash a block's own tokens only."""

        red = "[7, 7] after [1, 2] and [7, 7] after [1, 3] have the same hash"

        def hash_block_tokens(parent, token_ids):
            return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()

    class wrong_hashes_digits_without_separators:
        """Join the ids as text, so that [1, 23] and [12, 3] look alike."""

        red = "[1, 23] and [12, 3] have the same hash"

        def hash_block_tokens(parent, token_ids):
            return hashlib.sha256(parent + "".join(map(str, token_ids)).encode()).digest()

    class wrong_hashes_a_block_that_is_not_full:
        """Hash the tokens after the last full block, too."""

        red = "tokens: 1, full blocks of 2: 0, hashes: 1"

        def extend_block_hashes(hashes, token_ids, block_size):
            for start in range(len(hashes) * block_size, len(token_ids), block_size):
                parent = hashes[-1] if hashes else b""
                hashes.append(hash_block_tokens(parent, token_ids[start : start + block_size]))

    class wrong_starts_over:
        """Append the hashes of all blocks again at each call."""

        red = "it is one token longer each time"

        def extend_block_hashes(hashes, token_ids, block_size):
            parent = b""
            for end in range(block_size, len(token_ids) + 1, block_size):
                parent = hash_block_tokens(parent, token_ids[end - block_size : end])
                hashes.append(parent)


class Step2:
    class right_one_block_at_a_time:
        """Take and forget block by block, and move a block in the queue with two branches."""

        class BlockPool:
            def cache_block(self, block, block_hash):
                if block_hash in self.cached:
                    return
                self.cached[block_hash] = block
                self.hashes[block] = block_hash
                self._observer.tell("cache", block, block_hash)

            def get_new_blocks(self, count):
                assert len(self.free) >= count, "too few free blocks"
                blocks = []
                while len(blocks) < count:
                    block = next(iter(self.free))
                    del self.free[block]
                    block_hash = self.hashes.pop(block, None)
                    if block_hash is not None:
                        self.cached.pop(block_hash)
                        self._observer.tell("evict", block, block_hash, "taken")
                    self.ref_counts[block] += 1
                    blocks.append(block)
                return blocks

            def touch(self, blocks):
                for block in blocks:
                    if self.ref_counts[block] == 0:
                        del self.free[block]
                    self.ref_counts[block] += 1

            def free_blocks(self, blocks):
                for block in blocks[::-1]:
                    self.ref_counts[block] -= 1
                    if self.ref_counts[block] > 0:
                        continue
                    self.free[block] = None
                    if block not in self.hashes:
                        self.free.move_to_end(block, last=False)

    class right_two_passes:
        """Give back the cached blocks first and then the others, and raise ValueError for what must not happen."""

        class BlockPool:
            def get_new_blocks(self, count):
                if count > len(self.free):
                    raise ValueError(f"only {len(self.free)} of {count} blocks are free")
                blocks = list(self.free)[:count]
                for block in blocks:
                    self.free.pop(block)
                    self.ref_counts[block] = 1
                for block in blocks:
                    if block in self.hashes:
                        self._observer.tell("evict", block, self.hashes[block], "taken")
                        del self.cached[self.hashes[block]]
                        del self.hashes[block]
                return blocks

            def free_blocks(self, blocks):
                for block in blocks:
                    self.ref_counts[block] -= 1
                idle = [block for block in blocks if self.ref_counts[block] == 0]
                for block in reversed(idle):
                    if block in self.hashes:
                        self.free[block] = None
                for block in reversed(idle):
                    if block not in self.hashes:
                        self.free[block] = None
                        self.free.move_to_end(block, last=False)

    class wrong_gives_back_the_beginning_first:
        """Give back a table from its beginning to its end."""

        red = "the rest of a prefix can't be hit"

        class BlockPool:
            def free_blocks(self, blocks):
                for block in blocks:
                    self.ref_counts[block] -= 1
                    if self.ref_counts[block] == 0:
                        self.free[block] = None
                        self.free.move_to_end(block, last=block in self.hashes)

    class wrong_puts_the_end_of_a_table_in_front:
        """Cached blocks go back in reverse order, the others in the order of the table."""

        red = "are taken as [5, 0, 6]"
        unseen = "any free block serves: play says that the blocks are others, and that this is fine"

        class BlockPool:
            def free_blocks(self, blocks):
                for block in blocks:
                    self.ref_counts[block] -= 1
                idle = [block for block in blocks if self.ref_counts[block] == 0]
                for block in reversed([block for block in idle if block in self.hashes]):
                    self.free[block] = None
                for block in [block for block in idle if block not in self.hashes]:
                    self.free[block] = None
                    self.free.move_to_end(block, last=False)

    class wrong_mixes_cached_and_other_blocks:
        """Append every block at the back of the queue."""

        red = "the cached blocks 0 and 3 must come last"

        class BlockPool:
            def free_blocks(self, blocks):
                for block in reversed(blocks):
                    self.ref_counts[block] -= 1
                    if self.ref_counts[block] == 0:
                        self.free[block] = None

    class wrong_leaves_a_hit_in_the_queue:
        """Count a new holder, and leave the block among the free ones."""

        red = "a block that is held must leave the free queue"

        class BlockPool:
            def touch(self, blocks):
                for block in blocks:
                    self.ref_counts[block] += 1

    class wrong_remembers_what_is_overwritten:
        """Take a block, and leave its hash in the index."""

        red = "hash a still leads to it"

        class BlockPool:
            def get_new_blocks(self, count):
                assert count <= len(self.free)
                blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
                for block in blocks:
                    self.ref_counts[block] = 1
                    if block in self.hashes:
                        self._observer.tell("evict", block, self.hashes[block], "taken")
                return blocks

    class wrong_lets_the_newest_block_win:
        """Point the index at the second of two equal blocks."""

        red = "block 0 must stay the block of hash a"

        class BlockPool:
            def cache_block(self, block, block_hash):
                self.cached[block_hash] = block
                self.hashes[block] = block_hash
                self._observer.tell("cache", block, block_hash)

    class wrong_forgets_the_hash_of_the_block:
        """Enter the hash, and do not note that the block has one."""

        red = "in `hashes`, it leaves {}"

        class BlockPool:
            def cache_block(self, block, block_hash):
                if block_hash not in self.cached:
                    self.cached[block_hash] = block
                    self._observer.tell("cache", block, block_hash)

    class wrong_takes_from_the_back:
        """popitem() without last=False takes the block that was used last."""

        red = "the cached blocks 0 and 3 must come last"

        class BlockPool:
            def get_new_blocks(self, count):
                assert count <= len(self.free)
                blocks = [self.free.popitem()[0] for _ in range(count)]
                for block in blocks:
                    self.ref_counts[block] = 1
                    if block in self.hashes:
                        block_hash = self.hashes.pop(block)
                        del self.cached[block_hash]
                        self._observer.tell("evict", block, block_hash, "taken")
                return blocks

    class wrong_counts_no_holder:
        """Take blocks, and leave their counts at 0."""

        red = "the counts of their holders are [0, 0, 0, 0, 0, 0]"

        class BlockPool:
            def get_new_blocks(self, count):
                assert count <= len(self.free)
                blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
                for block in blocks:
                    if block in self.hashes:
                        block_hash = self.hashes.pop(block)
                        del self.cached[block_hash]
                        self._observer.tell("evict", block, block_hash, "taken")
                return blocks


class Step3:
    class right_loops:
        """Look hash after hash up in a loop, check for room before taking, and cache by index."""

        class BlockManager:
            def find_hits(self, seq):
                hits = []
                if self._enable_caching:
                    extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                    for block_hash in seq.block_hashes:
                        block = self.pool.cached.get(block_hash)
                        if block is None or (len(hits) + 1) * self.block_size >= seq.num_tokens:
                            break
                        hits.append(block)
                return hits

            def num_needed(self, seq, hits):
                idle = [block for block in hits if self.pool.ref_counts[block] == 0]
                return cdiv(seq.num_tokens, self.block_size) - len(hits) + len(idle)

            def allocate(self, seq, hits):
                assert seq not in self._holders, "it holds blocks already"
                assert self.num_needed(seq, hits) <= self.num_free_blocks, "there is not enough room"
                self.pool.touch(hits)
                num_new = cdiv(seq.num_tokens, self.block_size) - len(hits)
                seq.block_table = [*hits, *self.pool.get_new_blocks(num_new)]
                seq.num_computed_tokens = len(hits) * self.block_size
                self.prefix_cache_stats.queries += seq.num_tokens
                self.prefix_cache_stats.hits += seq.num_computed_tokens
                self._holders.add(seq)
                self._observer.tell("admit", seq, hits)

            def cache_blocks(self, seq, num_tokens):
                if self._enable_caching:
                    extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                    for i, block in enumerate(seq.block_table):
                        is_full = (i + 1) * self.block_size <= seq.num_computed_tokens
                        is_new = (i + 1) * self.block_size > seq.num_computed_tokens - num_tokens
                        if is_full and is_new:
                            self.pool.cache_block(block, seq.block_hashes[i])

    class right_gives_hits_back_if_there_is_no_room:
        """Try to take the rest, and release the hits if that fails; cache all full blocks at each step."""

        class BlockManager:
            def allocate(self, seq, hits):
                assert seq not in self._holders
                self.pool.touch(hits)
                try:
                    new = self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(hits))
                except AssertionError:
                    self.pool.free_blocks(hits)
                    raise
                self._holders.add(seq)
                seq.block_table = list(hits) + new
                seq.num_computed_tokens = self.block_size * len(hits)
                stats = self.prefix_cache_stats
                stats.queries, stats.hits = stats.queries + seq.num_tokens, stats.hits + seq.num_computed_tokens
                self._observer.tell("admit", seq, hits)

            def cache_blocks(self, seq, num_tokens):
                if not self._enable_caching:
                    return
                extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                for i in range(seq.num_computed_tokens // self.block_size):
                    self.pool.cache_block(seq.block_table[i], seq.block_hashes[i])

    class right_keeps_no_hashes:
        """Hash the tokens anew at each call, in a list of its own."""

        class BlockManager:
            def find_hits(self, seq):
                hits, hashes = [], []
                if not self._enable_caching:
                    return hits
                extend_block_hashes(hashes, seq.token_ids[:-1], self.block_size)
                while len(hits) < len(hashes) and hashes[len(hits)] in self.pool.cached:
                    hits.append(self.pool.cached[hashes[len(hits)]])
                return hits

            def cache_blocks(self, seq, num_tokens):
                if not self._enable_caching:
                    return
                hashes = []
                extend_block_hashes(hashes, seq.token_ids[: seq.num_computed_tokens], self.block_size)
                first = (seq.num_computed_tokens - num_tokens) // self.block_size
                for block, block_hash in list(zip(seq.block_table, hashes, strict=False))[first:]:
                    self.pool.cache_block(block, block_hash)

    class wrong_hits_the_whole_prompt:
        """Let the block of the last token be a hit."""

        red = "without the logits of its last token there is no next one"

        class BlockManager:
            def find_hits(self, seq):
                if not self._enable_caching:
                    return []
                extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                return [self.pool.cached[h] for h in takewhile(self.pool.cached.__contains__, seq.block_hashes)]

    class wrong_goes_on_after_a_miss:
        """Return every cached block, also behind one that is missing."""

        red = "the first and the third are cached"

        class BlockManager:
            def find_hits(self, seq):
                if not self._enable_caching:
                    return []
                extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                hashes = seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]
                return [self.pool.cached[block_hash] for block_hash in hashes if block_hash in self.pool.cached]

    class wrong_takes_before_it_holds:
        """Take new blocks first, which may evict the hits."""

        red = "hits the two least recently used ones"

        class BlockManager:
            def allocate(self, seq, hits):
                new = self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(hits))
                self.pool.touch(hits)
                seq.block_table = hits + new
                seq.num_computed_tokens = len(hits) * self.block_size
                self._holders.add(seq)
                self.prefix_cache_stats.queries += seq.num_tokens
                self.prefix_cache_stats.hits += seq.num_computed_tokens
                self._observer.tell("admit", seq, hits)

    class wrong_counts_idle_hits_as_room:
        """Need no free block for a hit, although an idle one leaves the free queue."""

        red = "they leave the free queue, too"

        class BlockManager:
            def num_needed(self, seq, hits):
                return cdiv(seq.num_tokens, self.block_size) - len(hits)

    class wrong_caches_blocks_that_are_not_computed:
        """Cache all full blocks of a sequence, computed or not."""

        red = "has computed 5 of its 16 tokens"

        class BlockManager:
            def cache_blocks(self, seq, num_tokens):
                if not self._enable_caching:
                    return
                extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                for block, block_hash in zip(seq.block_table, seq.block_hashes, strict=False):
                    self.pool.cache_block(block, block_hash)
