"""The field's formats of heads, and ours: a file for each kind, which registers itself.

| kind | config.json | tensors |
|---|---|---|
| ours | `outrider_head` | those of the module, 8-bit matrices with `.scale`, `token_map` |
| dflash | `dflash_config`; speculators_model_type dflash | fc, hidden_norm, layers.i.*, norm; perhaps embed_tokens, lm_head, d2t, t2d |
| eagle3 | any: known by its tensors; speculators_model_type eagle3 | fc, midlayer.* or layers.i.*, each with hidden_norm; norm, lm_head, d2t, t2d |
| medusa | architectures or model_type medusa, or medusa_num_heads | blocks.i.layers.j.*, lm_heads.i.*; or i.j.linear.*, i.n.* |
| mtp | a whole model's | DeepSeek: model.layers.N.{enorm, hnorm, eh_proj, shared_head.*, …}; Qwen: mtp.* |

Not here: the modules themselves, and how a directory is read (`loading`, above). Begin with `format`.
"""  # noqa: E501

from outrider.heads.formats import dflash, eagle3, medusa, mtp
from outrider.heads.formats.format import FORMATS, HeadFormat, OurHead, register

__all__ = ["FORMATS", "HeadFormat", "OurHead", "dflash", "eagle3", "medusa", "mtp", "register"]
