# SPDX-License-Identifier: Apache-2.0
"""One file per command; each is imported by main.py when it is called, and imports heavy packages when it runs."""
