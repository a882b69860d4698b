"`Shared`: a context of the whole process that several users may have open at once."
import threading
from collections.abc import Callable
from typing import Any


class Shared:
    "A context of the whole process: the first of its users, in any thread, enters it, and the last one leaves it."
    def __init__(self, make: Callable[[], Any]): # Returns a new context
        self.make, self.lock, self.n_users = make, threading.RLock(), 0

    def __enter__(self) -> None:
        with self.lock:
            if not self.n_users:
                self.context = self.make()
                self.context.__enter__()
            self.n_users += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.n_users -= 1
            if not self.n_users: self.context.__exit__(None, None, None)
