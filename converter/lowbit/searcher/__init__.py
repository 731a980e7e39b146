"""``lowbit.search``: which layer gets how many bits, from what each width costs and does on this device."""
