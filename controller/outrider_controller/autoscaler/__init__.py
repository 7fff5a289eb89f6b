"""Whether, how far and with which draft each tenant speculates. Pure: no I/O, no threads; the clock is an argument."""
