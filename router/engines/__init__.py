"""The engines that workers run: one package per engine."""
