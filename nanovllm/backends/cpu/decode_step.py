"""A decode step of a few sequences as one compiled function over all layers.

A step of few rows is a walk over the weights: each operation of a framework in between costs more than its own work,
and its threads wait for each other after each. Here the weights and the cached keys are read where they lie, once a
step (phases.py). The thread that calls is worker 0; helpers run the same function, and see a step in the mailbox when
it is there (team.py).
"""

from numba import njit

from .phases import PHASES, attend_all, compute_logits, gate_and_up, project_down, project_out, project_qkv
from .step_parts import Model, Step
from .team import look, open_phases, show, wait_for_step
from .vectors import ENTRY, OPTIONS, Memory, floats, get, integers, read, stored, write


@njit(**ENTRY)
def decode_step(worker: int, seen: int, step: Step, model: Model) -> int:
    """Worker 0 runs `step`. A helper takes part in all steps after `seen`, until none comes for a while.

    Returns the number of the last step seen.
    """
    mailbox = integers(model.room.mailbox)
    if worker == 0:
        open_phases(integers(model.room.counters), model.shape.num_layers * PHASES + 1, step.number)
        embed(step, model)
        post(step, mailbox)
    while True:
        number = wait_for_step(mailbox, seen)
        if number == seen:
            return seen
        seen = number
        run_layers(worker, posted(number, mailbox), model)
        if worker == 0:
            return seen


@njit(**OPTIONS)
def run_layers(worker: int, step: Step, model: Model) -> None:
    for layer in range(model.shape.num_layers):
        phase = layer * PHASES
        project_qkv(worker, phase, layer, step, model)
        attend_all(worker, phase + 1, layer, step, model)
        project_out(worker, phase + 2, layer, step, model)
        gate_and_up(worker, phase + 3, layer, step, model)
        project_down(worker, phase + 4, layer, step, model)
    compute_logits(worker, model.shape.num_layers * PHASES, step, model)


@njit(**OPTIONS)
def embed(step: Step, model: Model) -> None:
    """x [rows, hidden_size] = the embedding of each token"""
    size, embedding, x = model.sizes.hidden_size, stored(model.weights.embedding, model.like), floats(model.room.x)
    for m in range(step.rows):
        token_id = get(integers(step.token_ids), m)
        for i in range(size):
            write(x, m * size + i, read(embedding, token_id * size + i))


@njit(**OPTIONS)
def post(step: Step, mailbox: Memory) -> None:
    """Whoever sees anything of a step sees its phases open; the number comes last: whoever sees it sees the rest."""
    show(mailbox, 1, step.token_ids)
    show(mailbox, 2, step.tables)
    show(mailbox, 3, step.max_blocks)
    show(mailbox, 4, step.lens)
    show(mailbox, 5, step.rows)
    show(mailbox, 6, step.splits)
    show(mailbox, 7, step.hidden)
    show(mailbox, 8, step.logits)
    show(mailbox, 0, step.number)


@njit(**OPTIONS)
def posted(number: int, mailbox: Memory) -> Step:
    """Return the step in the mailbox. A helper that reads it while the next one is written finds no piece to take."""
    token_ids, tables, max_blocks = look(mailbox, 1), look(mailbox, 2), look(mailbox, 3)
    lens, rows, splits = look(mailbox, 4), look(mailbox, 5), look(mailbox, 6)
    return Step(number, token_ids, tables, max_blocks, lens, rows, splits, look(mailbox, 7), look(mailbox, 8))
