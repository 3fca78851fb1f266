"""KV events by the Python client against a real kvtierd: what a router that follows them knows."""

import pathlib
import sys
import threading
import time
import unittest

try:
    import grpc  # noqa: F401
    import numpy as np
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import kvtier
from live_server import LiveServer
from refusal_case import RefusalCase

LAYERS, HEADS, DIM, PAGE, BLOCK = 2, 2, 64, 64, 16
BOUND_S = 20


class Router:
    """Who holds what, as far as events have told."""

    def __init__(self):
        self.blocks = {}
        self.cleared = 0
        self.position = kvtier.Position()

    def apply(self, subscription):
        for event in next(subscription):
            match event:
                case kvtier.BlockStored():
                    self.blocks |= dict.fromkeys(event.block_hashes, event)
                case kvtier.BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.blocks[block_hash]
                case kvtier.AllBlocksCleared():
                    self.blocks = {}
                    self.cleared += 1
        self.position = subscription.position

    def held(self, keys):
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))


class EventTest(RefusalCase):
    def setUp(self):
        self.server = LiveServer("64MiB", "--max-subscriptions=2", "--event-log=64KiB")
        self.addCleanup(lambda: self.server.stop())
        self.client = kvtier.Client(self.server.address)
        self.addCleanup(self.client.close)
        self.model = self.register(self.client)

    @staticmethod
    def register(client):
        return client.register_model("m", [kvtier.Layer(HEADS, DIM)] * LAYERS, page_tokens=PAGE)

    def subscribe(self, after=None):
        subscription = self.client.subscribe(after)
        self.addCleanup(subscription.close)
        return subscription

    def put(self, sequence, prompt, tokens, client=None):
        values = np.zeros((tokens, HEADS, DIM), np.uint16)
        with (client or self.client).append(sequence, self.model, prompt=prompt) as stream:
            for layer in range(LAYERS):
                stream.send(layer, stream.received_tokens, values, values)

    def keys(self, prompt):
        return kvtier.prefix_keys("default", self.model.id, prompt, BLOCK)

    def follow(self, router, subscription, until):
        """Applies events until they say so; a stream that says nothing ends the test."""
        guard = threading.Timer(BOUND_S, subscription.close)
        guard.start()
        try:
            while not until():
                router.apply(subscription)
        except StopIteration:
            self.fail(f"no event within {BOUND_S} s")
        finally:
            guard.cancel()

    def test_a_router_knows_what_lookup_finds(self):
        router, subscription = Router(), self.subscribe()
        prompt = kvtier.Prompt(token_ids=range(200), adapter="lora", extra_keys={3: b"image"})
        self.put("a", prompt, 200)
        keys = self.keys(prompt)
        self.follow(router, subscription, lambda: router.held(keys) == 12)
        self.assertEqual(self.client.lookup(self.model, [prompt]), [192])
        stored = [router.blocks[key] for key in keys]
        for index, (key, event) in enumerate(zip(keys, stored, strict=True)):
            place = event.block_hashes.index(key)
            self.assertEqual(event.token_ids[place * BLOCK : (place + 1) * BLOCK], tuple(prompt.token_ids[index * BLOCK :][:BLOCK]))
            self.assertEqual(event.extra_keys.get(place), b"image" if index == 3 else None)
            parent = event.block_hashes[place - 1] if place else event.parent_block_hash
            self.assertEqual(parent, keys[index - 1] if index else None)
        event = stored[0]
        self.assertEqual((event.block_size, event.lora_name, event.medium), (BLOCK, "lora", "CPU"))
        self.assertEqual(event.model_id, self.model.id)
        self.client.remove("a")
        self.follow(router, subscription, lambda: not router.blocks)

    def test_a_prompt_of_hashes_gives_them_back(self):
        router, subscription = Router(), self.subscribe()
        prompt = kvtier.Prompt(block_hashes=[b"one", b"two"])
        self.put("a", prompt, 40)
        self.follow(router, subscription, lambda: len(router.blocks) == 2)
        event = router.blocks[self.keys(prompt)[0]]
        self.assertEqual((event.engine_block_hashes, event.token_ids), ((b"one", b"two"), ()))

    def test_who_comes_back_is_told_what_it_missed(self):
        router, subscription = Router(), self.subscribe()
        self.follow(router, subscription, lambda: router.position.number > 0)
        subscription.close()
        prompt = kvtier.Prompt(token_ids=range(160))
        self.put("a", prompt, 160)
        self.follow(router, self.subscribe(router.position), lambda: router.held(self.keys(prompt)) == 10)
        self.assertEqual(router.cleared, 1)

    def test_who_missed_too_much_begins_anew(self):
        router = Router()
        first = self.subscribe()
        self.follow(router, first, lambda: router.position.number > 0)
        first.close()
        prompts = [kvtier.Prompt(token_ids=range(i * 10_000, i * 10_000 + 1600)) for i in range(10)]
        for i, prompt in enumerate(prompts):
            self.put(f"s{i}", prompt, 1600)
        self.client.remove("s0")
        subscription = self.subscribe(router.position)
        self.follow(router, subscription, lambda: router.position.number > 0 and router.cleared == 2)
        self.assertEqual([router.held(self.keys(prompt)) for prompt in prompts], [0] + [100] * 9)

    def test_a_restart_is_a_new_begin(self):
        router, subscription = Router(), self.subscribe()
        prompt = kvtier.Prompt(token_ids=range(160))
        self.put("a", prompt, 160)
        self.follow(router, subscription, lambda: len(router.blocks) == 10)
        begin = time.monotonic()
        self.server.stop()
        self.assertLess(time.monotonic() - begin, 10, "a subscription held up the shutdown")
        self.assert_refused("DRAINING", lambda: next(subscription))
        self.server = LiveServer("64MiB")
        client = kvtier.Client(self.server.address)
        self.addCleanup(client.close)
        self.follow(router, client.subscribe(router.position), lambda: router.cleared == 2)
        self.assertEqual(router.blocks, {})

    def test_there_is_a_limit(self):
        streams = [self.subscribe(), self.subscribe()]
        for stream in streams:
            next(stream)
        self.assert_refused("TOO_MANY_SUBSCRIPTIONS", lambda: next(self.subscribe()))
        streams[0].close()
        deadline = time.monotonic() + BOUND_S
        while True:  # the server hears of it a moment later
            try:
                next(self.subscribe())
                break
            except kvtier.KvTierError:
                self.assertLess(time.monotonic(), deadline)

    def test_another_namespace_hears_nothing(self):
        with kvtier.Client(self.server.address, namespace="other") as other:
            router, subscription = Router(), other.subscribe()
            self.put("a", kvtier.Prompt(token_ids=range(160)), 160)
            self.put("b", kvtier.Prompt(token_ids=range(32)), 32, other)
            self.follow(router, subscription, lambda: router.blocks)
            self.assertEqual(len(router.blocks), 2)

    def test_a_namespace_that_cannot_be(self):
        with kvtier.Client(self.server.address, namespace="x" * 129) as client:
            self.assert_refused("INVALID_FIELD", lambda: next(client.subscribe()))


if __name__ == "__main__":
    unittest.main()
