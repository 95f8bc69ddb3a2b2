"""The tier in Mooncake Store: memory of a process beside the workers, which all of them read and write.

A worker asks that process, `mooncake_client`, over loopback, and the bytes go through memory that both have mapped
(the library calls this a dummy client). So a worker opens no port, and what it has kept outlives it. Begin with `tier`,
a worker's end; `breaker` and `lanes` keep it from waiting. Who starts the library's processes is `serving.store`.

What the library does, as seen with 0.3.13.post1, shapes these files:
- Memory for blocks must be the library's own (`alloc_from_mem_pool`): with one other address a whole batch is -600.
  Not even `close` gives it back; its pages are given back here.
- A call takes 0.1 to 0.5 ms: `batch_is_exist` 0.1 ms for 2 keys and 9 ms for 4096, `batch_get_into` 0.1 ms for 256 KiB
  and 0.4 ms for seven of them. Of a stored length other than asked for it tells, where there is room; -600 where not.
- A put onto a key that is there is 0 and changes nothing: wrong bytes stay until they are removed.
- No space is -200, for the rest of the batch. Blocks are given up in the background, a share of them at each -200, and
  none for which somebody has asked within the lease. What was just put has no lease.
- A killed client: -900 at once, then after 4.3 s once or twice, then at once. A new one is found within 3.5 s, unless
  it starts so fast that the library has not missed the old one: then gets and puts are -600 for good, while
  `batch_is_exist` works. So they are where the worker was stopped for 10 s. New memory and a new setup help.
  Until the master forgets the old client, 10 s, it has all blocks, gets are -800, and so are some puts.
- A killed master: as a killed client; the next one knows no block, and the client finds it within 3 s.
- A stopped client: every call blocks for 30 s, whatever MC_RPC_TIMEOUT_MS says, and is -900. When the client went on,
  such a get still wrote, and such a put stored what its memory held by then. So only a checksum is believed, of a copy.
  When the master has forgotten a stopped client, it comes back empty.
- A stopped master: calls block for MC_RPC_TIMEOUT_MS of the client's environment; by itself for 30 s.
- `setup_dummy` and `close` hold Python's lock, so that no other thread runs: for 30 s where the client is stopped,
  4.3 s where it is gone, and `close` up to 1 s where all is well. Neither is called before the client has just
  answered. All other calls let go of it. A call before a setup crashes the process.
- A process that ends while the client is stopped takes 30 s for it, in a handler of the library's that C calls at the
  end, and aborts if a call hangs. So a worker ends by `_exit` (`serving.deploy.startup.end_process`).
- While the client is gone, the library would log a line every 2 s, and one for every key that it is asked for: it is
  silenced, and the tier says once why nothing is to be had.
- Asked to set up with a port of anything else, it has not returned after 30 s. So the client's socket is looked for.
Whole objects are fetched, and never ranges of them (`get_into_ranges`), though a mesh cut by tokens or layers wants
less than a whole block. Measured for 8 blocks of 1.18 MB, on two cores of a Xeon: whole objects 2.06 ms; ranges that
together are whole 5.1 to 5.8 ms; half of each block 3.1 ms, a quarter 2.3 ms; half in 8 ranges a block 4.6 ms. So even
a quarter of the bytes takes longer than all of them.
The other way, a segment in each worker (`setup`), works too and was not taken: its blocks go with the worker, each
worker listens on all interfaces, a get from a stopped one blocks for 60 s, and the bytes go over TCP, 0.4 to 18 ms for
256 KiB.
Source: Mooncake (Qin et al. 2025, FAST), https://github.com/kvcache-ai/Mooncake.
"""
