# SPDX-License-Identifier: Apache-2.0
"""Layouts that fit, their memory and their time, before a device is booked."""
