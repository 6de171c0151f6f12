from jax_magi._src.native._cpu import AttentionNeeds as AttentionNeeds
from jax_magi._src.native._cpu import attention_needs as attention_needs
from jax_magi._src.native._cpu import handlers as handlers
