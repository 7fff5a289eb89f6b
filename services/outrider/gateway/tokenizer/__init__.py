"""Models as a gateway knows them: tokenizers, chat templates, and text from token ids.

They come from targets (`catalog`). Not here: the weights, and the answers (`outrider.gateway.generation`).
Begin with `model`.
"""
