"Commands: the check and the demo; and `keep_freed_memory`."
