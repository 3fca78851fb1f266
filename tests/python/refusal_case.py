"""Tests of what a server refuses."""

import unittest

import kvtier


class RefusalCase(unittest.TestCase):
    def assert_refused(self, reason, call):
        """That `call` raises a KvTierError of this reason; what it says."""
        with self.assertRaises(kvtier.KvTierError) as caught:
            call()
        self.assertEqual(caught.exception.reason, reason)
        return str(caught.exception)
