"""The routes of OpenAI's files and batches. A tenant sees its own; those of others do not exist."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import FileResponse, Response

from moonshard.rpc.status import InvalidArgument, NotFound, Overloaded
from moonshard.serving.config.tenants import Tenants
from moonshard.serving.gateway.batches.api.objects import batch_object, file_object, page
from moonshard.serving.gateway.batches.api.requests import DECODER, batch_meant
from moonshard.serving.gateway.batches.api.uploads import PURPOSE, Upload
from moonshard.serving.gateway.batches.journal import Journal
from moonshard.serving.gateway.batches.records import BatchRecord, FileRecord
from moonshard.serving.gateway.batches.runner import Runner
from moonshard.serving.gateway.batches.store import Store
from moonshard.serving.gateway.caller import check_key
from moonshard.serving.gateway.http.edge import header_of
from moonshard.serving.gateway.http.errors import json_response, late_headers
from moonshard.serving.gateway.http.reading import Bodies
from moonshard.serving.gateway.quoted import quoted

MAX_UNFINISHED = 100  # batches of a tenant
MAX_FILES_LISTED, MAX_BATCHES_LISTED, BATCHES_LISTED = 10_000, 100, 20
RETRY_AFTER_S = 10.0
_OFF = "files and batches are off here: batches.path in the configuration names a folder for them"
type Handler = Callable[[Request], Awaitable[Response]]
type Methods = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """What the routes are over, where batches are served."""

    store: Store
    journal: Journal
    runner: Runner


class BatchRoutes:
    def __init__(self, batches: Batches, bodies: Bodies, tenants: Tenants) -> None:
        self._store, self._journal, self._runner = batches.store, batches.journal, batches.runner
        self._bodies = bodies
        self._tenants = tenants

    # ---- files

    async def files(self, request: Request) -> Response:
        tenant = self._tenant(request)
        if request.method != "POST":
            return await self._list_files(request, tenant)
        upload = Upload(self._store, self._journal)
        try:
            record = await upload.receive(request, tenant)
        finally:
            upload.close()
        await self._journal.count()
        return json_response(file_object(record))

    async def file(self, request: Request) -> Response:
        record = await self._file(request)
        if request.method != "DELETE":
            return json_response(file_object(record))
        if (user := await self._journal.run(self._store.user_of, record.id)) is not None:
            raise InvalidArgument(f"id: {user} reads this file, and has not ended", field="id")
        await self._journal.run(self._store.delete_file, record)
        await self._journal.count()
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        record = await self._file(request)
        return FileResponse(self._store.path_of(record.id), media_type="application/jsonl")

    async def _list_files(self, request: Request, tenant: str) -> Response:
        asked = request.query_params
        order, limit = asked.get("order") or "desc", _limit(request, MAX_FILES_LISTED, MAX_FILES_LISTED)
        if order not in ("asc", "desc"):
            raise InvalidArgument("order: must be asc or desc", field="order")
        found = await self._journal.run(
            self._store.files,
            tenant,
            purpose=asked.get("purpose"),
            after=asked.get("after"),
            limit=limit + 1,
            is_oldest_first=order == "asc",
        )
        return json_response(page([file_object(each) for each in found[:limit]], has_more=len(found) > limit))

    async def _file(self, request: Request) -> FileRecord:
        file_id = request.path_params["id"]
        found = await self._journal.run(self._store.file, self._tenant(request), file_id)
        if found is None:
            raise NotFound(f"there is no file {quoted(file_id)}", field="id")
        return found

    # ---- batches

    async def batches(self, request: Request) -> Response:
        tenant = self._tenant(request)
        return await (self._create if request.method == "POST" else self._list_batches)(request, tenant)

    async def batch(self, request: Request) -> Response:
        return self._shown(await self._batch(request))

    async def cancel(self, request: Request) -> Response:
        """One that has ended, or is about to, stays as it is."""
        found = await self._batch(request)
        of = ("validating", "in_progress")
        if await self._journal.run(self._store.move, found.id, "cancelling", of=of):
            self._runner.cancel(found.id)
        return self._shown(await self._batch(request))

    async def _create(self, request: Request, tenant: str) -> Response:
        _, meant = await self._bodies.read(DECODER, request, lambda body: batch_meant(body, tenant))
        file = await self._journal.run(self._store.file, tenant, meant.input_file_id)
        if file is None:
            name = "input_file_id"
            raise NotFound(f"{name}: there is no file {quoted(meant.input_file_id)}", field=name)
        if file.purpose != PURPOSE:
            raise InvalidArgument(f"input_file_id: its purpose is {file.purpose}, not {PURPOSE}", field="input_file_id")
        if len(await self._journal.run(self._store.unfinished, tenant)) >= MAX_UNFINISHED:
            raise Overloaded(f"{MAX_UNFINISHED} batches have not ended", retry_after_s=RETRY_AFTER_S)
        await self._journal.run(self._store.add_batch, meant)
        self._runner.begin(meant.id)
        return json_response(batch_object(meant), headers=late_headers(request))

    async def _list_batches(self, request: Request, tenant: str) -> Response:
        limit = _limit(request, BATCHES_LISTED, MAX_BATCHES_LISTED)
        after = request.query_params.get("after")
        found = await self._journal.run(self._store.batches, tenant, after=after, limit=limit + 1)
        shown = [batch_object(each, self._journal.trouble) for each in found[:limit]]
        return json_response(page(shown, has_more=len(found) > limit))

    async def _batch(self, request: Request) -> BatchRecord:
        batch_id = request.path_params["id"]
        found = await self._journal.run(self._store.batch, batch_id, self._tenant(request))
        if found is None:
            raise NotFound(f"there is no batch {quoted(batch_id)}", field="id")
        return found

    def _shown(self, record: BatchRecord) -> Response:
        return json_response(batch_object(record, self._journal.trouble))

    def _tenant(self, request: Request) -> str:
        return check_key(self._tenants, header_of(request)).name


def batch_routes(batches: Batches | None, bodies: Bodies, tenants: Tenants) -> dict[str, tuple[Methods, Handler]]:
    """By path: methods and handler. Without batches each says which key of the configuration brings them."""
    get, post, options = ("GET", "HEAD"), ("POST",), ("OPTIONS",)
    methods = {
        "/v1/files": (*get, *post, *options),
        "/v1/files/{id}": (*get, "DELETE", *options),
        "/v1/files/{id}/content": (*get, *options),
        "/v1/batches": (*get, *post, *options),
        "/v1/batches/{id}": (*get, *options),
        "/v1/batches/{id}/cancel": (*post, *options),
    }
    if batches is None:
        return {path: (allowed, _off) for path, allowed in methods.items()}
    on = BatchRoutes(batches, bodies, tenants)
    handlers = (on.files, on.file, on.content, on.batches, on.batch, on.cancel)
    return {path: (allowed, handler) for (path, allowed), handler in zip(methods.items(), handlers, strict=True)}


async def _off(_request: Request) -> Response:
    raise NotFound(_OFF, field="batches.path")


def _limit(request: Request, default: int, most: int) -> int:
    said = request.query_params.get("limit")
    if said is None:
        return default
    if not (said.isascii() and said.isdecimal() and len(said) <= 9 and 1 <= int(said) <= most):
        raise InvalidArgument(f"limit: must be an integer from 1 to {most}, not {quoted(said)}", field="limit")
    return int(said)
