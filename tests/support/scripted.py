"""A model without weights: a runner whose every token is a pure function, and a tokenizer of bytes. No torch.

The runner is also the judge of the scheduler. It keeps a KV cache of token ids, one list per block, makes the plan's
copies, writes each row's tokens where its block table says, and then reads the whole context of each row back. Each
block also carries a digest of all that stood before it when its first slot was written, as key/values do. If a row
reads anything but its own prefix, whoever mixed up the blocks is told at once, with a `PagingError`. With a `window`,
there are layers that read no further back than that from blocks of their own; with `num_blocks` 0 there are no others.

    runner = ScriptedRunner(num_blocks=64, script="hash")
    engine = Engine(runner, EngineConfig(max_num_seqs=8))
    ...
    assert outputs == expected_output(runner, request, choice=0)      # what the request gives alone, without an engine
"""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from functools import partial

from headrace.engine.intake import Limits, sequences_of
from headrace.engine.sequence import Sequence, State
from headrace.engine.stopping import finish_after_last
from headrace.engine.types import Finish, Plan, Request, RowResult, ScheduledRow, TokenLogprobs

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
BYTE_VOCAB_SIZE = 260
EMPTY = -1  # a slot that was never written, or poisoned

Script = str | TokenIds[int] | Callable[[Sequence], int]


class PagingError(AssertionError):
    """A row read something else than its own prefix, or the plan breaks its own rules."""


@dataclass(slots=True)
class _Block:
    tokens: list[int]
    before: int = 0  # digest of all tokens before the block, when its first slot was written


def _extend(digest: int, tokens: TokenIds[int]) -> int:
    return hash((digest, *tokens))


def _mix(*values: object) -> int:
    """A number of 61 bits that is the same in every process: Python hashes of integers are."""
    return hash(values) & (2**61 - 1)


@dataclass
class ScriptedRunner:
    """Implements `types.Runner`. `script` says what it answers:

    * "hash": ids that look random and depend on the whole context, EOS about every `eos_every` tokens;
    * "echo": the prompt once more, then EOS;
    * a list of ids: these, then EOS;
    * a function of the sequence (read-only): whatever it returns.

    Above temperature 0, "hash" also depends on (seed, choice, position). Honoured in all scripts: stop ids are banned
    below `min_tokens`, a `logit_bias` of 50 or more forces its token, `logprobs` and `prompt_logprobs` give values.
    """

    vocab_size: int = BYTE_VOCAB_SIZE
    num_blocks: int = 64
    block_size: int = 16
    max_model_len: int = 512
    window: int = 0
    num_window_blocks: int = 0
    eos_token_ids: frozenset[int] = frozenset({EOS})
    script: Script = "hash"
    step_time_s: float = 0.0
    eos_every: int = 24
    nan_token_id: int | None = None  # a row that computes this token is not finite
    fail_steps: Collection[int] = ()  # steps in which `run` raises RuntimeError after having written half of the rows
    max_num_batched_tokens: int | None = None  # checked if given
    plans: list[tuple[tuple[str, int, int, int], ...]] = field(default_factory=list)
    keep_plans: bool = False  # remember (request id, choice, start, tokens) of every row in `plans`

    def __post_init__(self) -> None:
        self.blocks = [_Block([EMPTY] * self.block_size) for _ in range(self.num_blocks)]
        self.window_blocks = [_Block([EMPTY] * self.block_size) for _ in range(self.num_window_blocks)]
        # what each running sequence had: epoch, block ids, window block ids
        self._tables: dict[Sequence, tuple[int, list[int], list[int]]] = {}

    def run(self, plan: Plan) -> list[RowResult]:
        """Write, read back, sample. Raises PagingError as soon as something is wrong."""
        self._check_tables(plan)
        return self.compute(plan)

    def compute(self, plan: Plan) -> list[RowResult]:
        """`run`, but for the rules of epochs: the plan's sequences may be copies."""
        self._check_plan(plan)
        if self.step_time_s:
            time.sleep(self.step_time_s)
        for blocks, copies in ((self.blocks, plan.copies), (self.window_blocks, plan.window_copies)):
            for source, destination in copies if blocks else ():
                blocks[destination].tokens[:] = blocks[source].tokens
                blocks[destination].before = blocks[source].before
        for number, row in enumerate(plan.rows):
            if plan.step in self.fail_steps and number >= len(plan.rows) // 2:
                raise RuntimeError(f"scripted failure of step {plan.step}")
            self._write(row)
        for row in plan.rows:
            self._read_back(row)
        if self.keep_plans:
            rows = ((row.sequence, row) for row in plan.rows)
            self.plans.append(tuple((one.request_id, one.choice, row.start, row.num_tokens) for one, row in rows))
        return [self._result(row) for row in plan.rows]

    def poison(self, block_ids: Collection[int], *, windowed: bool = False) -> None:
        """Overwrite blocks that nobody may read any more."""
        blocks = self.window_blocks if windowed else self.blocks
        for block_id in block_ids if blocks else ():
            blocks[block_id].tokens[:] = [EMPTY] * self.block_size
            blocks[block_id].before = EMPTY

    def next_token(self, sequence: Sequence) -> int:
        """Return what follows the known tokens of a sequence: a pure function of them and of its options."""
        options = sequence.options
        banned = sequence.stop_ids if sequence.num_output_tokens < options.min_tokens else frozenset[int]()
        forced = [token_id for token_id, bias in options.logit_bias.items() if bias >= 50 and token_id not in banned]
        if forced:
            return max(forced, key=lambda token_id: (options.logit_bias[token_id], token_id))
        token_id = self._scripted(sequence)
        while token_id in banned:
            token_id = (token_id + 1) % self.vocab_size
        return token_id

    def limits(self) -> Limits:
        """Return what the engine checks requests against on this runner."""
        return Limits(self.vocab_size, self.eos_token_ids, self.max_model_len, self.num_blocks, self.block_size)

    def _scripted(self, sequence: Sequence) -> int:
        position = sequence.num_output_tokens
        if callable(self.script):
            return self.script(sequence)
        eos = min(self.eos_token_ids, default=0)
        if self.script == "hash":
            noise = (sequence.options.seed, sequence.choice, position) if sequence.options.temperature > 0 else ()
            value = _mix(*noise, *sequence.token_ids)
            return eos if value % self.eos_every == 0 else value // self.eos_every % self.vocab_size
        if isinstance(self.script, str) and self.script != "echo":
            raise ValueError(f"unknown script {self.script!r}")
        text = sequence.token_ids[: sequence.num_prompt_tokens] if self.script == "echo" else self.script
        return int(text[position]) if position < len(text) else eos

    def _check_plan(self, plan: Plan) -> None:
        budget = self.max_num_batched_tokens
        if not plan.rows or (budget is not None and plan.num_tokens > budget):
            raise PagingError(f"step {plan.step} computes {plan.num_tokens} tokens of at most {budget}")
        if len({id(row.sequence) for row in plan.rows}) != len(plan.rows):
            raise PagingError(f"step {plan.step} names a sequence twice")
        for copies in (plan.copies, plan.window_copies):
            if len({destination for _, destination in copies}) != len(copies):
                raise PagingError(f"step {plan.step} copies to a block twice")
        for row in plan.rows:
            end = row.start + row.num_tokens
            known = len(row.sequence.token_ids)
            if row.start != row.sequence.num_computed_tokens or not row.start < end <= known:
                raise PagingError(f"{_name(row)} computes [{row.start}, {end}) of {known} tokens")
            if end >= row.sequence.max_len:
                raise PagingError(f"{_name(row)} computes its last token, which nobody needs")
            if row.samples != (end == known):
                raise PagingError(f"{_name(row)} must sample exactly if it reaches its last token")

    def _check_tables(self, plan: Plan) -> None:
        """Entries of a block table change only together with its epoch: a runner may rely on it."""
        for row in plan.rows:
            sequence = row.sequence
            epoch, known, window = self._tables.get(sequence, (-1, [], []))
            if epoch == sequence.epoch and sequence.block_ids[: len(known)] != known:
                raise PagingError(f"{_name(row)} had blocks {known}, has {sequence.block_ids} in the same epoch")
            now = zip(window, sequence.window_ids, strict=False)
            if epoch == sequence.epoch and any(block_id not in (EMPTY, had) for had, block_id in now):
                raise PagingError(f"{_name(row)} had {window}, has {sequence.window_ids} in the same epoch")
            self._tables[sequence] = (sequence.epoch, list(sequence.block_ids), list(sequence.window_ids))
        if len(self._tables) > 2 * len(plan.rows) + 16:
            self._tables = {one: kept for one, kept in self._tables.items() if one.state is State.RUNNING}

    def _write(self, row: ScheduledRow) -> None:
        sequence = row.sequence
        for position in range(row.start, row.start + row.num_tokens):
            index, slot = divmod(position, self.block_size)
            if self.blocks:
                block = self.blocks[sequence.block_ids[index]]
                if slot == 0:
                    before = self.blocks[sequence.block_ids[index - 1]] if index else None
                    block.before = _extend(before.before, before.tokens) if before else 0
                block.tokens[slot] = sequence.token_ids[position]
            if self.window_blocks:
                block = self.window_blocks[_there(sequence.window_ids[index], row)]
                if slot == 0:  # the block before may have been let go
                    block.before = self._digest(sequence, index)
                block.tokens[slot] = sequence.token_ids[position]

    def _read_back(self, row: ScheduledRow) -> None:
        if self.blocks:
            self._read_blocks(row, 0, self.blocks, row.sequence.block_ids)
        if self.window_blocks:
            first = max(0, row.start - self.window + 1) // self.block_size
            self._read_blocks(row, first, self.window_blocks, row.sequence.window_ids)

    def _read_blocks(self, row: ScheduledRow, first: int, blocks: list[_Block], block_ids: list[int]) -> None:
        sequence, end = row.sequence, row.start + row.num_tokens
        digest = self._digest(sequence, first)
        for index in range(first, -(-end // self.block_size)):
            block = blocks[_there(block_ids[index], row)]
            start = index * self.block_size
            wanted = sequence.token_ids[start : min(start + self.block_size, end)]
            if block.tokens[: len(wanted)] != wanted or block.before != digest:
                raise PagingError(
                    f"{_name(row)} reads {block.tokens[: len(wanted)]} after {block.before} in block"
                    f" {block_ids[index]} at {start}, but has {wanted} after {digest}"
                )
            digest = _extend(digest, block.tokens)

    def _digest(self, sequence: Sequence, num_blocks: int) -> int:
        """Of the first blocks of a sequence, as blocks that were written one after the other would have it."""
        digest, size = 0, self.block_size
        for index in range(num_blocks):
            digest = _extend(digest, sequence.token_ids[index * size : (index + 1) * size])
        return digest

    def _result(self, row: ScheduledRow) -> RowResult:
        sequence = row.sequence
        if self.nan_token_id in sequence.token_ids[row.start : row.start + row.num_tokens]:
            return RowResult(finite=False)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.options.prompt_logprobs is not None:
            last = min(row.start + row.num_tokens, sequence.num_prompt_tokens - 1)
            prompt_logprobs = tuple(
                self._logprobs(sequence.token_ids[:position], sequence.token_ids[position], top)
                for top in (sequence.options.prompt_logprobs,)
                for position in range(row.start + 1, last + 1)
            )
        if not row.samples:
            return RowResult(prompt_logprobs=prompt_logprobs)
        token_id = self.next_token(sequence)
        logprobs = None
        if sequence.options.logprobs is not None:
            logprobs = self._logprobs(sequence.token_ids, token_id, sequence.options.logprobs)
        return RowResult(token_id, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _logprobs(self, context: TokenIds[int], chosen: int, top: int) -> TokenLogprobs:
        """The chosen one and the `top` best: values that fall with the rank and depend on the context alone."""
        first = _mix(*context) % self.vocab_size
        best = [((first + rank) % self.vocab_size, -0.25 * (rank + 1)) for rank in range(top)]
        return ((chosen, dict(best).get(chosen, -9.0)), *best)


class LaunchingRunner(ScriptedRunner):
    """Implements `types.Launcher` too: computes as soon as a step is launched, and tells when it lands."""

    def launch(self, plan: Plan) -> Callable[[], list[RowResult]]:
        """Compute now. Every other failure is told at once, the others when the step lands."""
        try:
            results = self.run(plan)
        except RuntimeError as error:
            if plan.step % 2:
                raise
            return partial(_fail, error)
        return lambda: results


def _fail(error: RuntimeError) -> list[RowResult]:
    raise error


def expected_output(
    runner: ScriptedRunner, request: Request, choice: int = 0, max_tokens: int = 1 << 20
) -> tuple[list[int], Finish | None]:
    """Return what a choice gives when it runs alone: its new tokens (settled ones left out) and how it ends."""
    sequences = {sequence.choice: sequence for sequence in sequences_of(request, runner.limits(), 0)}
    sequence = sequences[choice]
    known = sequence.num_tokens
    while sequence.num_tokens - known < max_tokens:
        if runner.nan_token_id in sequence.token_ids:
            return sequence.token_ids[known:], Finish("error", error="numeric")
        sequence.token_ids.append(runner.next_token(sequence))
        finish = finish_after_last(sequence)
        if finish is not None:
            return sequence.token_ids[known:], finish
    return sequence.token_ids[known:], None


def _there(block_id: int, row: ScheduledRow) -> int:
    if block_id < 0:
        raise PagingError(f"{_name(row)} needs a block that it has let go")
    return block_id


def _name(row: ScheduledRow) -> str:
    return f"{row.sequence.request_id}/{row.sequence.choice}"


class ByteDetokenizer:
    """Implements `types.Detokenizer`: incremental UTF-8; special tokens and unknown ids give no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: tuple[int, ...]) -> str:
        """Take ids, give whole characters."""
        return self._decoder.decode(bytes(token_id for token_id in token_ids if 0 <= token_id < 256))

    def flush(self) -> str:
        """Give half a character as U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ByteTokenizer:
    """Implements `types.Tokenizer`: one id per byte of UTF-8, four special ids, no files."""

    vocab_size = BYTE_VOCAB_SIZE

    def __init__(self, *, add_bos: bool = False) -> None:
        self.add_bos = add_bos

    def encode(self, text: str) -> list[int]:
        """Bytes, after BOS if so made."""
        return [BOS] * self.add_bos + list(text.encode())

    def encode_chat(
        self,
        messages: list[dict[str, object]],
        tools: list[object] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """`IM_START role newline content IM_END newline` for each message, then the beginning of an answer.

        What else a template may see stands before, so that tests can tell whether it arrived.
        """
        ids = [BOS] * self.add_bos
        for given in (tools, template_kwargs):
            ids += json.dumps(given).encode() if given else b""
        for message in messages:
            ids += [IM_START, *f"{message['role']}\n{message['content']}".encode(), IM_END, *b"\n"]
        return [*ids, IM_START, *b"assistant\n"]

    def detokenizer(self) -> ByteDetokenizer:
        """A fresh one."""
        return ByteDetokenizer()

    def decode(self, token_ids: TokenIds[int]) -> str:
        """Whole text of a list of ids."""
        detokenizer = self.detokenizer()
        return detokenizer.push(tuple(token_ids)) + detokenizer.flush()
