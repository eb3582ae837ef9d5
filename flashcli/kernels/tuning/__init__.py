"""Models of time and rules of thumb that choose the fastest, with the record or the tries that made their numbers.

`chunks` decides how kernel ``wgmma`` cuts and shares out keys, by figures of single blocks that were measured by hand
(docs/tuning/attention.md). `cost`, whose constants in `costs` are fitted to cuda/records/grid.json, decides between
kernels. `decode` tunes paged decode (docs/tuning/decode.md).

The first two are not one model: fitted to whole kernels, `cost` does not tell forms of wgmma apart. Of 3000 shapes it
would cut 19 % otherwise, some of which `chunks` expects to take 1.8 times as long. Nor does `chunks` do for `cost`: as
wgmma's time it fits the record as well, and chooses the same kernels there; but of 6000 other calls it changes 68. Of
those, on an H100, two queries and 1255 keys of 256 numbers take 2.1 times as long, and small causal batches of short
sequences, d = 96 and 128, up to 1.5 times.
"""
