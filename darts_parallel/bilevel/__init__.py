"""The bilevel loop: search a plan while a small Transformer trains.

Exact parallelism does not change the loss. Three things do couple a plan with training, and this
package is built on them: lossy communication, the batch size, and the measured speed of learning.
"""
