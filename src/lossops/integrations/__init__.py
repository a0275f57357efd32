"""lossops inside the models and trainers of other packages, a module for each package.

`import lossops` imports none of them. `lossops.integrations.transformers` needs transformers.
"""
