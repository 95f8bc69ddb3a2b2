"""Who used how much: tenants' accounts, the ledger on disk, and their rates.

Begin with `accounts`. Prices are `serving.config.prices`', metrics lie beside this folder.
"""
