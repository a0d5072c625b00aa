"""A manager and a sequence that only count slots, for tests of admission."""


class SlotCounter:
    """A manager that counts slots. A sequence holds as many as its full length needs."""

    def __init__(self, num_slots):
        self.num_slots, self.held = num_slots, 0

    def can_allocate(self, seq):
        return self.held + seq.size <= self.num_slots

    def allocate(self, seq):
        self.held += seq.size

    def free(self, seq):
        self.held -= seq.size

    def report(self):
        return self.held


class Seq:
    def __init__(self, num_prompt_tokens, num_output_tokens):
        self.token_ids = [1] * num_prompt_tokens
        self.size = num_prompt_tokens + num_output_tokens
        self.request_id, self.slots, self.num_computed_tokens = "", range(0), 0

    @property
    def num_tokens(self):
        return len(self.token_ids)
