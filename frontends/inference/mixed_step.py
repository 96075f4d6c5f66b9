"""Mixed steps of a session: one new token of some sequences, and prompt tokens of another one, in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...backends.capabilities import HasRowIndependentProducts
from ...scheduler import DeferredInterrupts
from ..models import Batch, Step
from .prefill_chunks import F32, convert_to_token_ids, next_power_of_two
from .session import Session


def can_run_mixed_steps(session: Session) -> bool:
    """Whether a session can run mixed steps with the same bits as separate decode and prefill steps.

    The matrix products must give a row the same bits at any number of rows. GPUs, and processors with AMX, do not.
    Sharded products do not either, because they are summed in another order.
    """
    return (
        session.watch is None
        and session.world.size == 1
        and session.model.can_mix_prompt_and_decode
        and (len(session.group) == 1 or session.on.split_mode == "layer")
        and all(
            isinstance(one, HasRowIndependentProducts) and one.has_row_independent_products()
            for one, _ in session.group
        )
    )


def make_mixed_step(session: Session, prompt_tokens: int, length: int) -> Step:
    """Make the mixed step that decodes one token per sequence and reads `prompt_tokens` tokens of one of them.

    Args:
        session: The session.
        prompt_tokens: The bucket of prompt tokens, a power of two.
        length: The tokens of the longest sequence after the run.
    """
    step = session.make_step(1, length, session.sequences + 1)
    return replace(step, prompt_tokens=prompt_tokens)


def evaluate_mixed_step(
    session: Session, tokens: Sequence[Sequence[int]], sequence: int, prompt: Sequence[int], *, min_tokens: int
) -> list[F32]:
    """Append a token to some sequences and prompt tokens to another one, and return the last logits of each.

    Args:
        session: The session.
        tokens: The new token of each sequence; none for an idle one and for the sequence of the prompt.
        sequence: The number of the sequence of the prompt.
        prompt: Its new tokens, one batch at most.
        min_tokens: The smallest bucket of prompt tokens.

    Returns:
        The logits f32[1, vocabulary] of each sequence, and 0 rows for an idle one.
    """
    new = [convert_to_token_ids(i, prompt if i == sequence else one) for i, one in enumerate(tokens)]
    with session.store.device_lock:
        session.require_evaluable_tokens(new)
        longest = max(n + len(one) for n, one in zip(session.lengths, new, strict=True))
        step = make_mixed_step(session, next_power_of_two(max(len(prompt), min_tokens)), longest)
        executor = session.executor(step)
        decoded = [[] if i == sequence else one for i, one in enumerate(new)]
        batch = Batch(decoded, session.lengths, tables=session.tables, prompt=(sequence, new[sequence]))
        inputs = session.model.inputs(step, batch)
        with DeferredInterrupts():  # states and lengths belong together
            logits = executor.run(inputs)["logits"]
            session.reversible_step = None
            session.record_evaluated_chunk(new)
    rows = [logits[i : i + 1] if one else logits[:0] for i, one in enumerate(decoded)]
    rows[sequence] = logits[-1:]
    return rows
