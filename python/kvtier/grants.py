"""What a client holds by number until a deadline: leases and pins."""


class Lease:
    """What can be read until the lease ends, whatever becomes of the sequences that hold it; a context manager.

    tokens: how many it holds, from the first on; 0 where nothing of the prompt is held, and then there is no lease.
    """

    def __init__(self, client, lease_id, tokens):
        self._client = client
        self.id = lease_id
        self.tokens = tokens

    def renew(self, duration_s=0.0):
        """Sets the deadline anew, from now. A lease that has ended is KvTierError with the reason LEASE_ENDED."""
        self._client._renew(self.id, duration_s)

    def release(self):
        if self.id:
            self._client._release(self.id)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


class Pin:
    """Keeps something from eviction until it ends; tokens: how many; 0 where nothing is held, and then there is no pin."""

    def __init__(self, client, pin_id, tokens):
        self._client = client
        self.id = pin_id
        self.tokens = tokens

    def unpin(self):
        if self.id:
            self._client._unpin(self.id)
