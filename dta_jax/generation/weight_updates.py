"""Engines over HTTP whose weights follow the trainer's, and every token is stamped with the right version.

    trainer   writes version-N, complete or invisible, into a directory that the servers share
    servers   all at once, each on its own:
              no new call -> running calls are cut short, until none runs -> load -> take calls again

No call runs while a server loads, so every token of an answer was drawn with the version that its server had
when the call was sent. A call that was cut short goes on with the new weights. Its prefix is computed anew by
them, so its log-probabilities are the new policy's exactly; keeping old keys and values would make them
neither's.

A server that cannot load is out of service until it has the newest version, and so is one that was away: a
process that came back may have the weights that it was first started with.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final, Protocol

from dta_jax.errors import InputError
from dta_jax.generation.http import CallError, JsonClient
from dta_jax.generation.pool import Server, Servers
from dta_jax.generation.protocol import GenerationError
from dta_jax.generation.remote import RemoteGenerator, ServerApi
from dta_jax.generation.replies import Reply
from dta_jax.generation.weight_folders import WeightFolders
from dta_jax.model import Params
from dta_jax.qwen3 import Qwen3Config

ABORT_PAUSE: Final = 0.05  # seconds until a server is told again; calls may have been under way


class WeightsApi(ServerApi, Protocol):
    """A server that loads weights. All methods raise CallError."""

    async def reported_version(self, client: JsonClient) -> int | None:
        """The version that the server says it has; None if it does not say."""

    async def abort_all(self, client: JsonClient) -> None:
        """Cuts all running generations short; what they have is answered."""

    async def load_weights(self, client: JsonClient, folder: Path, version: int) -> None:
        """Loads a folder and forgets cached keys and values. No generation runs."""


class UpdatableGenerator(RemoteGenerator):
    """A `Generator` whose servers load what the trainer writes.

    Args:
      api, settings, version, seed: see `RemoteGenerator`.
      model: the policy.
      weights_dir: the directory that trainer and servers share, under the same path.
      load_seconds: how long a server may take to load.
      context_length: the servers'; None for the model's.
      companions: a folder whose tokenizer goes along with the weights; None for none.
    """

    def __init__(
        self,
        api: WeightsApi,
        settings: Servers,
        model: Qwen3Config,
        *,
        weights_dir: Path,
        context_length: int | None = None,
        companions: Path | None = None,
        version: int = 0,
        seed: int = 0,
    ):
        super().__init__(
            api,
            settings,
            vocab_size=model.vocab_size,
            context_length=context_length or model.max_position_embeddings,
            version=version,
            seed=seed,
        )
        self._weights_api = api
        self._folders = WeightFolders(weights_dir, model, companions)
        self._newest: tuple[int, Path] | None = None  # None: what the servers were started with
        self._updating = asyncio.Lock()

    async def update_weights(self, params: Params, version: int) -> None:
        """See `Generator.update_weights`. Returns when every server has the weights or is out of service.

        Raises:
          InputError: the version is not above the one before, or `weights_dir` cannot be written to.
          GenerationError: no server took the weights within `outage_seconds`.
        """
        async with self._updating:
            if version <= self._version:
                expected = f"above {self._version}"
                raise InputError("update_weights", "version", expected=expected, actual=version)
            self._pool.watch()
            folder = await asyncio.to_thread(self._folders.write, params, version)
            self._newest = (version, folder)
            servers = [server for server in self._pool.servers if server.state == "in"]
            for server in servers:
                self._pool.hold(server)
            try:
                await asyncio.gather(*(self._update(server, folder, version) for server in servers))
            finally:
                for server in servers:
                    if server.state == "updating":
                        self._pool.take_out(server, "an update of its weights was broken off")
            await self._wait_for_one(version)
            self._version = version
            await asyncio.to_thread(self._folders.prune, version)

    async def _update(self, server: Server, folder: Path, version: int) -> None:
        try:
            await self._drain(server)
            if server.state != "updating":
                return  # it went out meanwhile, and comes back with the newest weights
            await self._weights_api.load_weights(server.client, folder, version)
        except CallError as error:
            self._pool.take_out(server, str(error))
        else:
            server.version = version
            self._pool.admit(server)

    async def _drain(self, server: Server) -> None:
        """Returns when the server runs none of our calls."""
        try:
            async with asyncio.timeout(self._settings.timeout):
                while server.running:
                    await self._weights_api.abort_all(server.client)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_PAUSE):
                            await server.idle.wait()
        except TimeoutError:
            raise CallError("timeout", f"{server.client.url}: calls do not end when aborted") from None

    async def _wait_for_one(self, version: int) -> None:
        servers = self._pool.servers
        try:
            async with asyncio.timeout(self._settings.outage_seconds):
                while not any(server.state == "in" and server.version == version for server in servers):
                    if self._pool.closed:
                        raise GenerationError("the engine is closed")
                    self._pool.admitted.clear()
                    await self._pool.admitted.wait()
        except TimeoutError:
            reasons = "; ".join(server.reason for server in servers)
            raise GenerationError(f"no server loaded version {version}: {reasons}") from None

    def _check_version(self, server: Server, reply: Reply, version: int) -> None:
        """A server that answers with other weights than it was given goes out of service."""
        if self._newest is not None and reply.version not in (None, version):
            words = f"{server.client.url}: weights of version {reply.version} instead of {version}"
            self._pool.take_out(server, words)
            raise CallError("reply", words)

    async def _inspect(self, server: Server) -> None:
        await super()._inspect(server)
        if self._newest is not None:
            version = server.version
            reported = await self._weights_api.reported_version(server.client)
            if reported not in (None, version) and server.version == version:
                raise CallError("reply", f"{server.client.url}: reports version {reported}, not {version}")

    async def _revive(self, server: Server) -> None:
        await super()._revive(server)
        while self._newest is not None:
            version, folder = self._newest
            if await self._weights_api.reported_version(server.client) != version:
                server.lost.set()  # nothing may run while it loads
                if server.running:
                    await server.idle.wait()
                await self._weights_api.load_weights(server.client, folder, version)
            server.version = version
            if self._newest[0] == version:
                return
