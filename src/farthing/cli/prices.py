"""`farthing prices`: what GPUs cost; `prices update` is the only verb that asks the network for
prices.
"""

from __future__ import annotations

import argparse

from farthing import clock
from farthing.cli.console import print_json, rich_console
from farthing.cli.parser import in_range
from farthing.errors import EXIT_FINISHED

ARGUMENTS = {
    "[action{update}]": "update: refresh the prices kept in the cache",
    "--gpu GPU...": 'only these GPUs, such as "RTX 4090" or h100',
    "--provider PROVIDER...": "only these providers",
    "--region REGION...": "only these regions; a prefix such as us- works",
    "--kind {spot,on-demand}": "only offers of this kind",
    "--sort {usd-per-gpu,usd,age}:=usd-per-gpu": (
        "sort by dollars a GPU-hour (default), dollars a machine-hour, or age"
    ),
    "--limit N": "rows to show; 0 shows all (default: 20; with --json all)",
    "--prices FILE": "use only the prices of this CSV file",
    "--json": "print the offers as JSON",
}


def run(arguments: argparse.Namespace) -> int:
    from farthing.prices.catalog import cache_path, read_catalog, select, sort_offers

    if arguments.action == "update":
        from farthing.prices.feeds import update
        from farthing.report.price_table import draw_update, update_as_json
        from farthing.report.safe import escape

        console = rich_console(stderr=arguments.json)
        with console.status("asking the price feeds") as status:
            result = update(
                cache_path(), clock.today(), progress=lambda text: status.update(escape(text))
            )
        if arguments.json:
            print_json(update_as_json(result))
        else:
            draw_update(console, result)
        return EXIT_FINISHED
    in_range("--limit", arguments.limit, 0)
    catalog = read_catalog(arguments.prices, clock.today())
    found = select(catalog, arguments.gpu, arguments.provider, arguments.region, arguments.kind)
    found, n_shown = sort_offers(found, arguments.sort), arguments.limit
    if n_shown is None:
        n_shown = 0 if arguments.json else 20
    shown = found[: n_shown or len(found)]
    from farthing.report.price_table import draw_prices, prices_as_json

    if arguments.json:
        print_json(prices_as_json(catalog, shown, len(found)))
    else:
        draw_prices(rich_console(), catalog, shown, len(found))
    return EXIT_FINISHED
