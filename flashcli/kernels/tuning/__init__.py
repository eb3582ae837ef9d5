"""Models of time and rules of thumb that choose the fastest, with the record or the tries that made their numbers.

`chunks` decides how kernel ``wgmma`` cuts and shares out keys, by figures of single blocks that were measured by hand
(docs/tuning/attention.md). `cost`, whose constants in `costs` are fitted to cuda/records/grid.json, decides between
kernels. `decode` tunes paged decode (docs/tuning/decode.md).

The first two are not one model: fitted to whole kernels, `cost` does not tell forms of wgmma apart. Of 3000 shapes it
would cut 19 % otherwise, some of which `chunks` expects to take 1.8 times as long.
"""
