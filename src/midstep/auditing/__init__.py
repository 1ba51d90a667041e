"""Auditing: run the loop you have, unchanged, and say what is wrong with it.

    script -> recorder (patches torch, restores it) -> events -> history -> checks -> findings

The recorder alone imports torch. It watches from outside and changes nothing: no random number is
drawn, no gradient is touched, no collective is added. The checks read events and nothing else.
"""
