"""`ampdctl status`: the cluster at a glance."""

from __future__ import annotations

from ampd.cli.options import Address, Output, resolve_address
from ampd.cli.output import Format, emit_one, print_table
from ampd.cli.runner import run_async
from ampd.cli.views import View, policy_view, worker_view
from ampd.cli.worker import WORKER_COLUMNS
from ampd.client import AmpdClient


def status(address: Address = "", output: Output = Format.TABLE) -> None:
    """Show the cluster's policy, coordinators and workers."""
    found = resolve_address(address)

    async def read() -> tuple[View, list[View]]:
        async with AmpdClient(found) as client:
            policy = policy_view(await client.get_policy())
            return policy, [worker_view(worker) async for worker in client.list_workers()]

    policy, workers = run_async(read())
    if output is Format.TABLE:
        summary = {"address": found, "policy": policy["name"], "settings": policy["settings"]}
        emit_one(summary, output)
        print_table(workers, WORKER_COLUMNS)
    else:
        emit_one({"address": found, "policy": policy, "workers": workers}, output)
