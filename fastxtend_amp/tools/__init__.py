"The commands `fastxtend_amp_check` and `fastxtend_amp_demo`, `precision_support` and `keep_freed_memory`."
