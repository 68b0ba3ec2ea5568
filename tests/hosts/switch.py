"""A switch between hosts as a process: it takes every packet that one host sends to another, and may delay, lose or
swallow it.

The kernel's own tc netem does the same, but many kernels come without it. The kernels of the hosts see an ordinary
network: their TCP retransmits what was lost, and nothing tells them of a cut.

Each line of the standard input is a new state in JSON, which a line on the standard output acknowledges:

    {"delay_s": 0.02, "loss": 0.01, "cut": [[1, 2]], "one_way": [[2, 3]], "seed": 7}

`cut` has pairs of hosts; both ways are cut. `one_way` has pairs of which the second does not hear the first. The
arguments are descriptors of tun devices, by the numbers of the hosts, as 1=5. An end of the input ends the switch.
"""

import heapq
import json
import os
import random
import select
import sys
import time
from itertools import count

PACKET_BYTES = 65_536
TURN = 64
"""Packets that are read from one host before another has a turn."""
QUEUE_PACKETS = 20_000
"""Most packets under way at a time. Further ones are lost, as in a switch that is full."""


class Switch:
    def __init__(self, devices: dict[int, int]) -> None:
        self._devices = devices
        self._delay_s, self._loss = 0.0, 0.0
        self._cut: set[tuple[int, int]] = set()
        self._random = random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._order = count()

    def run(self) -> None:
        """Forwards packets until the standard input ends."""
        numbers = {device: number for number, device in self._devices.items()}
        poll = select.epoll()
        for descriptor in (*numbers, sys.stdin.fileno()):
            poll.register(descriptor, select.EPOLLIN)
        while True:
            for descriptor, _ in poll.poll(self._deliver(time.monotonic())):
                if descriptor in numbers:
                    self._take(numbers[descriptor], descriptor)
                elif line := sys.stdin.readline():
                    self._become(**json.loads(line))
                else:
                    return

    def _become(
        self, delay_s: float, loss: float, cut: list[tuple[int, int]], one_way: list[tuple[int, int]], seed: int
    ) -> None:
        self._delay_s, self._loss, self._random = delay_s, loss, random.Random(seed)
        self._cut = {pair for one, other in cut for pair in ((one, other), (other, one))}
        self._cut.update((one, other) for one, other in one_way)
        if self._cut:  # what is under way is lost, too
            self._under_way = [row for row in self._under_way if not self._is_cut(row[3])]
            heapq.heapify(self._under_way)
        sys.stdout.write("done\n")
        sys.stdout.flush()

    def _take(self, number: int, device: int) -> None:
        for _ in range(TURN):
            try:
                packet = os.read(device, PACKET_BYTES)
            except OSError:  # nothing more is there, or the host's device is down
                return
            if packet[0] >> 4 != 4 or packet[19] not in self._devices or self._is_cut(packet):
                continue
            if self._loss and self._random.random() < self._loss:
                continue
            if not self._delay_s:
                self._put(packet[19], packet)
            elif len(self._under_way) < QUEUE_PACKETS:
                due = time.monotonic() + self._delay_s
                heapq.heappush(self._under_way, (due, next(self._order), packet[19], packet))

    def _is_cut(self, packet: bytes) -> bool:
        """The last bytes of the addresses of source and destination are the numbers of their hosts."""
        return bool(self._cut) and (packet[15], packet[19]) in self._cut

    def _deliver(self, now: float) -> float | None:
        """Delivers what is due. Returns the time until the next packet is, in seconds."""
        while self._under_way and self._under_way[0][0] <= now:
            _, _, number, packet = heapq.heappop(self._under_way)
            self._put(number, packet)
        return max(0.0, self._under_way[0][0] - now) if self._under_way else None

    def _put(self, number: int, packet: bytes) -> None:
        try:
            os.write(self._devices[number], packet)
        except OSError:  # the host's device is down, or its queue is full
            return


if __name__ == "__main__":
    Switch({int(number): int(device) for number, _, device in (word.partition("=") for word in sys.argv[1:])}).run()
