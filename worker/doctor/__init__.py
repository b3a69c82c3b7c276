"""`headrace doctor`: look at the server and the queue, say what is wrong and what to do.

`look` reads everything once into a frozen `Seen` and never writes; each check is a function of that value alone.
"""
