"""A choice of which the client wants no token: its prompt is all that it asks for.

A worker draws a token behind every prompt that it computes; here that one is dropped, and nobody is billed for it.
"""

from typing import final

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.serving.gateway.pipeline.choice import ChoiceStream


@final
class UnansweredChoice(ChoiceStream):
    """Ends with the worker's first output, by its length."""

    def __init__(self, index: int) -> None:
        super().__init__(index, None)

    def accept(self, output: link_pb2.SequenceOutput) -> pb.Delta | None:
        self.is_worker_done = output.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if self.is_ended:
            return None
        self.finish_reason = pb.FINISH_REASON_LENGTH
        return pb.Delta(choice=self.index, finish_reason=self.finish_reason)
