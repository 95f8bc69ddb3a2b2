"""What a follower runs: its part of the model, on a device thread, step by step as it is told. Needs jax."""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np

from moonshard.kv.store.stack import TierStack
from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import Config, WorkerRole
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.engine.device import DeviceThread, StepDone
from moonshard.serving.engine.encoder import padded
from moonshard.serving.engine.loading.model import LoadedModel, Progress
from moonshard.serving.engine.programs import Drawn, Launched, Programs
from moonshard.serving.engine.steps import Step, StepKind
from moonshard.serving.gang.members import loaded_as
from moonshard.serving.gang.part import PlanePart, ready_message
from moonshard.serving.gang.steps import AwaitedMasks, GangDiverged, StepChain, digest_of, step_from
from moonshard.serving.gang.tickets import is_of_tiers
from moonshard.serving.gang.tiers.part import TierPart
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.worker.loaded import load_parts
from moonshard.serving.worker.store.places import TierBlocks


def load(
    config: Config,
    role: WorkerRole,
    open_plane: Callable[[LoadedModel], KvPlane],
    progress: Progress,
    start: ProcessStart,
) -> "Steps":
    """Raises what `load_parts` does."""
    return Steps(*load_parts(config, role, open_plane, progress, start))


@dataclass(frozen=True, slots=True)
class _FollowedPrograms:
    """Programs whose tokens nobody reads here but to compare them."""

    programs: Programs

    def launch(self, step: Step) -> Launched:
        return self.programs.launch(step)

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        """What was drawn, as the devices gave it: whose row is whose only the leader knows. Of an export its blocks.

        Nothing is drawn without the last stage.
        """
        if launched.step.kind is StepKind.EXPORT:
            return self.programs.fetch(launched)
        jax.block_until_ready((launched.results, launched.scores, launched.guesses))
        is_drawn = launched.step.sampling is not None and self.programs.has_last
        return np.asarray(launched.results[0]) if is_drawn else None


class Steps:
    """The steps of one follower, and the orders of its plane and its tiers."""

    def __init__(self, model: LoadedModel, plane: KvPlane | None, tiers: TierStack | None):
        self._tiers = None if tiers is None else TierBlocks(tiers, model.layout.groups[0].block)
        self._tier_part: TierPart | None = None  # once it runs
        self._partitions = [partition for partition, owners in enumerate(model.held) if owners]
        self.ready = ready_message(plane, None if self._tiers is None else self._tiers.shared, loaded_as(model))
        self._plane = plane
        self._programs = model.programs
        self._num_partitions = model.shapes.num_partitions
        self._num_words = -(-model.vocab_size // 32)
        self._chain = StepChain()
        self._masks: AwaitedMasks | None = None  # of the last step

    async def run(
        self, told: asyncio.Queue[link_pb2.LeaderMessage], outbox: asyncio.Queue[link_pb2.FollowerMessage]
    ) -> None:
        """Until a step or an order is not the next one, or fails: raises that."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()

        def answer(what: link_pb2.FollowerAnswer) -> None:
            outbox.put_nowait(link_pb2.FollowerMessage(answer=what))

        def fail(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        def answer_of_tiers(what: link_pb2.TierAnswer) -> None:
            outbox.put_nowait(link_pb2.FollowerMessage(tier_answer=what))

        part = None if self._plane is None else PlanePart(self._plane, answer, fail)
        if self._tiers is not None:
            self._tier_part = TierPart(self._tiers, self._partitions, answer_of_tiers, fail)

        def done(step: StepDone) -> None:
            is_export = step.kind is StepKind.EXPORT
            if is_export:
                assert step.exported is not None  # the device's own kind of answer
                assert step.ticket is not None  # as of every export that a gang is told
                self._exported(step.ticket, step.partition, step.exported[: step.num_blocks], part)
            drawn = b"" if is_export or step.exported is None else digest_of(step.exported)
            outbox.put_nowait(link_pb2.FollowerMessage(done=link_pb2.FollowerDone(number=step.number, drawn=drawn)))

        def on_loop[T](handle: Callable[[T], None], what: T) -> None:
            loop.call_soon_threadsafe(handle, what)

        device = DeviceThread(
            _FollowedPrograms(self._programs),
            on_done=functools.partial(on_loop, done),
            on_failed=functools.partial(on_loop, fail),
        )
        device.start()
        while True:
            getting = asyncio.create_task(told.get())
            await asyncio.wait({getting, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            message = getting.result()
            match message.WhichOneof("message"):
                case "step":
                    device.submit(self._step(message.step, part))
                case "masks":
                    self._take_masks(message.masks)
                case "order" if part is not None:
                    part.obey(message.order)
                case "tier_order" if self._tier_part is not None:
                    self._tier_part.obey(message.tier_order)
                case what:
                    raise GangDiverged(f"the leader tells of what is not here: {what}")

    def beat(self) -> link_pb2.FollowerMessage:
        tiers = () if self._tier_part is None else self._tier_part.message
        return link_pb2.FollowerMessage(beat=link_pb2.FollowerBeat(tiers=tiers))

    def close(self) -> None:
        """Blocks. At the end of the gang, in order."""
        if self._tier_part is not None:
            self._tier_part.close()

    def _exported(self, ticket: int, partition: int, pages: np.ndarray, part: PlanePart | None) -> None:
        if not is_of_tiers(ticket):
            if part is not None:
                part.exported(ticket, pages)
        elif self._tier_part is not None:
            self._tier_part.exported(ticket, partition, pages)

    def _step(self, message: link_pb2.GangStep, part: PlanePart | None) -> Step:
        self._chain.check(message)
        if self._masks is not None:
            raise GangDiverged(f"step {message.number} came before the masks of the one before it")
        step = step_from(message, num_partitions=self._num_partitions, num_words=self._num_words)
        self._masks = step.allowed if isinstance(step.allowed, AwaitedMasks) else None
        if step.kind is not StepKind.LAND:
            return step
        return replace(step, payload=padded(self._payload(step, part), step.bucket))

    def _take_masks(self, message: link_pb2.GangMasks) -> None:
        """GangDiverged where no step waits for them."""
        self._chain.check(message)
        if self._masks is None:
            raise GangDiverged(f"masks came as {message.sequence} for a step that has none")
        self._masks.put(message)
        self._masks = None

    def _payload(self, step: Step, part: PlanePart | None) -> np.ndarray:
        """What a land writes. GangDiverged where nothing of its ticket came."""
        if step.ticket is not None and is_of_tiers(step.ticket) and self._tier_part is not None:
            return self._tier_part.payload(step.ticket, step.partition, step.num_blocks)
        if step.ticket is None or is_of_tiers(step.ticket) or part is None:
            raise GangDiverged(f"step {step.number} lands what was not copied out")
        return part.payload(step.ticket, step.num_blocks)
