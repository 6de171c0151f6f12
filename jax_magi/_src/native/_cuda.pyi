from jax_magi._src.native._cpu import COMMIT as COMMIT
from jax_magi._src.native._cpu import COMPILER as COMPILER
from jax_magi._src.native._cpu import LEFT_OUT as LEFT_OUT
from jax_magi._src.native._cpu import AttentionNeeds as AttentionNeeds
from jax_magi._src.native._cpu import attention_needs as attention_needs
from jax_magi._src.native._cpu import handlers as handlers
from jax_magi._src.native._cpu import variants as variants
