"""A file on its way in: from a form's body to a part of the store, never whole in memory."""

import asyncio
import os
from pathlib import Path
from typing import BinaryIO

from fastapi import Request
from starlette.requests import ClientDisconnect

from moonshard.rpc.status import Cancelled, InvalidArgument, Unavailable, UnsupportedEncoding
from moonshard.serving.gateway.batches.journal import RETRY_S, Journal
from moonshard.serving.gateway.batches.records import FileRecord
from moonshard.serving.gateway.batches.store import Store
from moonshard.serving.gateway.intake.inflate import encoding_of
from moonshard.serving.gateway.intake.multipart import FormReader, PartBegun, PartBytes, boundary_of
from moonshard.serving.gateway.quoted import quoted

PURPOSE = "batch"
MAX_FIELD_BYTES = 1 << 12  # of a field that is no file
MAX_FILENAME_CHARS = 255
_FIELDS = ("file", "purpose")


class Upload:
    """One file. `receive` once, then `close`, whatever happened."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self._store = store
        self._journal = journal
        self._part: Path = store.new_part()
        self._file: BinaryIO | None = None
        self._filename = ""
        self._fields: dict[str, bytes] = {}
        self._field: str | None = None  # whose bytes come; None: the file's
        self._num_bytes = 0

    async def receive(self, request: Request, tenant: str) -> FileRecord:
        """Raises InvalidArgument for a form that asks for what is not served, TooLarge, UnsupportedEncoding,
        Unavailable where the disk does not take it, Cancelled where the client leaves.
        """
        if encoding_of(request.headers.getlist("content-encoding")) != "identity":
            raise UnsupportedEncoding("an upload is not read compressed", field="content-encoding")
        reader = FormReader(boundary_of(request.headers.get("content-type", "")))
        try:
            async for arrived in request.stream():
                for event in reader.pieces(arrived):
                    await self._take(event)
            reader.finish()
            self._check()
            await asyncio.to_thread(self._sync)
        except ClientDisconnect as error:
            raise Cancelled("the client left while sending its file") from error
        except OSError as error:
            raise Unavailable(f"batches.path: {error.strerror}", retry_after_s=RETRY_S) from error
        return await self._journal.run(self._store.add_file, self._part, tenant, self._filename, PURPOSE)

    def close(self) -> None:
        self._journal.give_room(self._num_bytes)
        if self._file is not None:
            self._file.close()
        self._part.unlink(missing_ok=True)

    async def _take(self, event: PartBegun | PartBytes) -> None:
        match event:
            case PartBegun(name, filename):
                self._begin(name, filename)
            case PartBytes(said) if self._field is not None:
                self._fields[self._field] += said
                if len(self._fields[self._field]) > MAX_FIELD_BYTES:
                    raise InvalidArgument(f"{self._field}: more than {MAX_FIELD_BYTES} bytes", field=self._field)
            case PartBytes(said):
                self._journal.take_room(len(said))
                self._num_bytes += len(said)
                assert self._file is not None  # as `_begin` left it
                await asyncio.to_thread(self._file.write, said)

    def _begin(self, name: str, filename: str | None) -> None:
        if name not in _FIELDS:
            raise InvalidArgument(f"{quoted(name)} is not supported", field=name)
        if name != "file":
            self._field, self._fields[name] = name, b""
            return
        if self._file is not None:
            raise InvalidArgument("file: is given twice", field="file")
        self._field, self._filename = None, (filename or "upload")[:MAX_FILENAME_CHARS]
        self._file = open(self._part, "xb")  # noqa: SIM115  # `close` closes it

    def _check(self) -> None:
        purpose = self._fields.get("purpose")
        if purpose != PURPOSE.encode():
            said = "missing" if purpose is None else f"only {PURPOSE!r} is supported"
            raise InvalidArgument(f"purpose: {said}", field="purpose")
        if self._file is None:
            raise InvalidArgument("file: missing", field="file")

    def _sync(self) -> None:
        assert self._file is not None  # as `_check` found
        self._file.flush()
        os.fsync(self._file.fileno())
