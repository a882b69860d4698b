"The commands `fastxtend_amp_check` and `fastxtend_amp_demo`, and `precision_support`."
