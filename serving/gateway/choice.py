"""One choice of a request on its way out: a step's tokens become text, and a stop string ends it.

The worker ends a choice by token or length; only here is text known, so only here can a string end it. Tokens that the
worker made after that are dropped and not billed.
"""

from contextlib import suppress

from moonshard.models.tokenizer import TokenIdError
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.serving.detokenizer import Detokenizer


class ChoiceStream:
    """`detokenizer` is None for a model without a tokenizer: token ids go out, text stays empty."""

    def __init__(self, index: int, detokenizer: Detokenizer | None) -> None:
        self.index = index
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self.is_worker_done = False  # the worker has sent its last output of this choice
        self.token_ids: list[int] = []  # all that workers gave, until it ended; shown or not
        self._detokenizer = detokenizer

    @property
    def is_ended(self) -> bool:
        return self.finish_reason != pb.FINISH_REASON_UNSPECIFIED

    def accept(self, output: link_pb2.SequenceOutput) -> pb.Delta | None:
        """What to tell the client of a step's output; None once the choice has ended."""
        self.is_worker_done = output.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if self.is_ended:
            return None
        self.token_ids.extend(output.token_ids)
        delta = pb.Delta(choice=self.index, finish_reason=output.finish_reason)
        num_kept = len(output.token_ids)
        if self._detokenizer is not None:
            num_kept = self._add_text(delta, self._detokenizer, output)
        delta.token_ids.extend(output.token_ids[:num_kept])
        delta.logprobs.extend(output.logprobs[:num_kept])
        if delta.finish_reason == pb.FINISH_REASON_STOP and not delta.HasField("stop_string") and num_kept:
            delta.stop_token_id = output.token_ids[-1]
        self.finish_reason = delta.finish_reason
        return delta

    @staticmethod
    def _add_text(delta: pb.Delta, detokenizer: Detokenizer, output: link_pb2.SequenceOutput) -> int:
        """Sets the delta's text, and its finish where a stop string ends it; how many of the tokens count.

        A stop token gives no text, special or not. Neither does an id that the model has and the tokenizer has not.
        """
        num_tokens = len(output.token_ids)
        num_spoken = num_tokens - (output.finish_reason == pb.FINISH_REASON_STOP)
        pieces: list[str] = []
        for index, token in enumerate(output.token_ids[: max(num_spoken, 0)]):
            with suppress(TokenIdError):
                pieces.append(detokenizer.push((token,)).text)
            if detokenizer.stop_string is not None:
                num_tokens = index + 1
                break
        if output.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            pieces.append(detokenizer.finish())
        delta.text = "".join(pieces)
        if detokenizer.stop_string is not None:
            delta.stop_string, delta.finish_reason = detokenizer.stop_string, pb.FINISH_REASON_STOP
        return num_tokens
