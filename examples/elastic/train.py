"""Train a small network on 5,000 real digits with replicas that may be killed, restarted and added at any time.

torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 2 --join_timeout_ms 10000 --heartbeat_timeout_ms 5000
python examples/elastic/train.py --lighthouse http://127.0.0.1:29510 --name a
python examples/elastic/train.py --lighthouse http://127.0.0.1:29510 --name b
python examples/elastic/train.py --lighthouse http://127.0.0.1:29510 --name c

Each line runs in a terminal of its own, or on a host of its own. Kill a replica with Ctrl-\\, and start it again.
"""

import argparse
import hashlib
import logging
import sys

import torch

import syncline
from syncline.models.data import digits
from syncline.models.zoo import build_model, loss


def main(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    data = digits()
    model = build_model("cnn")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = syncline.elastic.Manager(options.lighthouse, name=options.name, interface=options.interface)
    exchange = syncline.Dense()
    handle = syncline.attach(model, exchange, optimizer=optimizer, every=options.every, manager=manager)

    while handle.stats().exchanges < options.exchanges:  # equal on all replicas, also on one that has just joined
        chosen = torch.randint(len(data.train_labels), (32,))
        shift = torch.randint(-2, 3, (2,)).tolist()
        optimizer.zero_grad()
        loss(model(data.train_images[chosen].roll(shift, (2, 3))), data.train_labels[chosen]).backward()
        optimizer.step()  # exchanges in every tenth step

    stats = handle.stats()
    with handle.synced(), torch.no_grad():
        right = model.eval()(data.held_out_images).argmax(-1) == data.held_out_labels
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    print(f"{stats.exchanges} exchanges, {stats.joins} joins, {stats.leaves} leaves, {stats.failed} failed exchanges")
    print(f"{right.float().mean():.1%} of held-out digits right; weights: {hashlib.sha256(weights).hexdigest()[:16]}")
    manager.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True, help="address of the lighthouse, as http://HOST:PORT")
    parser.add_argument("--name", help="name of this replica in messages")
    parser.add_argument("--interface", help="address of the network interface to listen on")
    parser.add_argument("--every", type=int, default=10, help="steps between two exchanges")
    parser.add_argument("--exchanges", type=int, default=200)
    try:
        main(parser.parse_args())
    except syncline.SynclineError as error:
        print(f"train: {error}", file=sys.stderr)
        sys.exit(2)
