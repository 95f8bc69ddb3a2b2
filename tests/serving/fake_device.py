"""A device for the scheduler's plans that knows what every block and slot must hold.

It draws tokens from (seed, choice, absolute position) alone, so that the right output of a request is known without
running it, and it keeps the contents of every block. A stale block, a wrong fork, a slot handed on too early or a
position off by one shows as contents that are not the sequence's own tokens. How many tokens a row of a decode step
emits is the script's; of its guesses those that are not emitted are wrong, and stay in the blocks. Of a KV group with
a window it looks at what the window has. A plan has run when `run` returns.
"""

import zlib
from collections.abc import Callable, Iterator, Set

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.plan import (
    CopyPlan,
    DecodePlan,
    DecodeRow,
    LoadPlan,
    Plan,
    PrefillChunk,
    PrefillPlan,
    Sampled,
    needs_slot_state,
)
from moonshard.serving.control.request import FinishReason, Request, SequenceId, SlotId

VOCAB_SIZE = 12
WRONG = -1  # a guess that the model does not confirm
GROUP = 1000  # what tells a token of one KV group from the same token of the one before


def truth(request: Request, choice: int, position: int) -> int:
    """The token of a choice at an absolute position: given in the prompt, drawn after it."""
    num_generated = position - len(request.prompt)
    if num_generated < 0:
        return request.prompt[position]
    token = zlib.crc32(f"{request.sampling.seed} {choice} {position}".encode()) % VOCAB_SIZE
    is_held_back = token in request.stop_token_ids and num_generated < request.min_tokens
    return token + VOCAB_SIZE if is_held_back else token


def true_tokens(request: Request, choice: int, num_tokens: int) -> list[int]:
    return [truth(request, choice, position) for position in range(num_tokens)]


def true_output(request: Request, choice: int) -> tuple[list[int], FinishReason]:
    num_prompt, output = len(request.prompt), []
    for num_generated in range(request.max_tokens):
        output.append(truth(request, choice, num_prompt + num_generated))
        if output[-1] in request.stop_token_ids and num_generated >= request.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


class FakeDevice:
    """Runs plans at once, in launch order, and refuses any that would read or write something wrong."""

    def __init__(self, pool: BlockPool, num_emitted: Callable[[DecodeRow], int] = lambda row: 1):
        self.pool, self.groups, self.block_size = pool, pool.groups, pool.block_size
        self.num_emitted = num_emitted
        self.pages: dict[tuple[int, int], list[int | None]] = {}
        self.last_token: dict[SlotId, tuple[SequenceId, int]] = {}
        self.history: dict[SlotId, list[int]] = {}  # of the slots' last load

    def run(self, plan: Plan) -> dict[SequenceId, Sampled]:
        match plan:
            case LoadPlan():
                assert list(plan.history) == true_tokens(plan.request, plan.sequence.choice, len(plan.history))
                assert len(plan.history) >= plan.num_prompt
                self.history[plan.slot] = list(plan.history)
                self.last_token[plan.slot] = (plan.sequence, plan.history[-1])
                return {}
            case CopyPlan():
                for partition, source, target in plan.pairs:
                    self.pages[partition, target] = list(self.pages[partition, source])
                return {}
            case PrefillPlan():
                return {id: token for chunk in plan.chunks for id, token in self.prefill(chunk).items()}
            case DecodePlan():
                return {row.sequence: self.decode(row) for row in plan.rows}

    def prefill(self, chunk: PrefillChunk) -> dict[SequenceId, Sampled]:
        end = chunk.start + len(chunk.tokens)
        assert list(chunk.tokens) == true_tokens(chunk.request, chunk.sequence.choice, end)[chunk.start :]
        for position, token in enumerate(chunk.tokens, start=chunk.start):
            self.write(chunk, position, token)
        self.check_kv(chunk, end)
        return {id: Sampled((self.draw(chunk.request, id, slot, end),)) for id, slot in chunk.samples}

    def decode(self, row: DecodeRow) -> Sampled:
        owner, token = self.last_token[row.slot]
        assert owner == row.sequence
        num_emitted, next_position = self.num_emitted(row), row.position + 1
        self.write(row, row.position, token)
        for position in range(next_position, row.position + row.q_len):
            is_right = position < row.position + num_emitted
            self.write(row, position, truth(row.request, row.sequence.choice, position) if is_right else WRONG)
        self.check_kv(row, row.position + max(1, num_emitted))
        positions = range(next_position, next_position + num_emitted)
        return Sampled(tuple(self.draw(row.request, row.sequence, row.slot, position) for position in positions))

    def land(
        self, request: Request, partition: int, block_table: tuple[int, ...], num_held: int, due: Set[tuple[int, int]]
    ) -> None:
        """Writes KV that was prefilled elsewhere into the blocks with which a request joins.

        The first `num_held` are there, but for those `due`, (partition, block): a step writes them that was decided
        before, and that therefore runs before any step that reads them.
        """
        for block in block_table[num_held:]:
            self.pages[partition, block] = [None] * self.block_size
        for index, seen in enumerate(self.pool.seen(len(request.prompt))):
            block, begin = block_table[seen.place], seen.column * self.block_size
            (group,) = (g for g in self.all_groups if self.groups.place(g, seen.column) == seen.place)
            content = [token + GROUP * group for token in request.prompt[begin : begin + self.block_size]]
            if index < num_held:
                assert (partition, block) in due or self.pages[partition, block] == content
            else:
                self.pages[partition, block] = content + [None] * (self.block_size - len(content))

    def write(self, item: PrefillChunk | DecodeRow, position: int, token: int) -> None:
        for group in self.all_groups:
            self.page(item, group, position)[position % self.block_size] = token + GROUP * group

    def page(self, item: PrefillChunk | DecodeRow, group: int, position: int) -> list[int | None]:
        block = item.block_table[self.groups.place(group, position // self.block_size)]
        return self.pages.setdefault((item.slot.partition, block), [None] * self.block_size)

    @property
    def all_groups(self) -> range:
        return range(len(self.groups))

    def check_kv(self, item: PrefillChunk | DecodeRow, num_tokens: int) -> None:
        """All that the first position of a chunk or of a row sees is there, up to so many tokens of the sequence."""
        right = true_tokens(item.request, item.sequence.choice, num_tokens)
        first = item.start if isinstance(item, PrefillChunk) else item.position
        for group, window in enumerate(group.window for group in self.groups.groups):
            seen = range(0 if window is None else max(0, first - window + 1), num_tokens)
            held = list(self.held(item, group, seen))
            assert held == [right[position] + GROUP * group for position in seen]

    def held(self, item: PrefillChunk | DecodeRow, group: int, positions: range) -> Iterator[int | None]:
        return (self.page(item, group, position)[position % self.block_size] for position in positions)

    def draw(self, request: Request, id: SequenceId, slot: SlotId, position: int) -> int:
        token = truth(request, id.choice, position)
        if needs_slot_state(request):
            assert self.history[slot] == true_tokens(request, id.choice, position)
            self.history[slot].append(token)
        self.last_token[slot] = (id, token)
        return token
