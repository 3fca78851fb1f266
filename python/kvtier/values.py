"""Values as they are appended."""

import numpy as np

from kvtier.dtypes import DTYPES, row_length


def checked(name, array, model, layer, heads, layout="NHD"):
    """K or V (`name`) of one layer of a Model, [tokens, heads, dim] (NHD) or [heads, tokens, dim] (HND), as numpy's array.

    Raises ValueError for a shape or dtype that the model does not have.
    """
    array = np.asarray(array)
    spec = model.layers[layer]
    dim = spec.v_head_dim if name == "v" and spec.v_head_dim is not None else spec.head_dim
    dtype = DTYPES[model.dtype][1]
    # bfloat16 and FP8 arrays of other packages are their bits.
    if array.dtype.itemsize == dtype.itemsize and array.dtype.kind == "V":
        array = array.view(dtype)
    want = ["tokens", heads] if layout == "NHD" else [heads, "tokens"]
    want.append(row_length(model.dtype, dim))
    fits = array.ndim == 3 and all(w in ("tokens", got) for w, got in zip(want, array.shape))
    if not fits or array.dtype != dtype:
        raise ValueError(
            f"{name} of layer {layer} is {array.dtype}{list(array.shape)}; want {dtype}[{', '.join(map(str, want))}]"
        )
    return array
