"""Batches of one gateway: opened from the configuration, and run as long as it is up."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from starlette.types import ASGIApp

from moonshard.serving.config.keys import BatchesConfig
from moonshard.serving.gateway.batches.api.routes import Batches
from moonshard.serving.gateway.batches.journal import Journal, opened_store
from moonshard.serving.gateway.batches.room import Room
from moonshard.serving.gateway.batches.runner import Runner, Work
from moonshard.serving.gateway.pipeline.generation import Gateway
from moonshard.serving.gateway.records.metrics import GatewayMetrics


def opened_batches(
    config: BatchesConfig,
    gateway: Gateway,
    metrics: GatewayMetrics,
    inner_app: Callable[[], ASGIApp],
    max_body_bytes: int,
) -> Batches | None:
    """None where they are off. `inner_app` makes the routes that lines are asked of. ConfigError where the folder
    cannot be had.
    """
    if config.path is None:
        return None
    store = opened_store(Path(config.path))
    journal = Journal(store, config.max_bytes, metrics)
    work = Work(
        app=inner_app(),
        store=store,
        journal=journal,
        room=Room(gateway),
        metrics=metrics,
        max_body_bytes=max_body_bytes,
    )
    return Batches(store=store, journal=journal, runner=Runner(work))


@contextlib.asynccontextmanager
async def running_batches(batches: Batches | None) -> AsyncIterator[None]:
    if batches is None:
        yield
        return
    async with batches.runner.running():
        yield
