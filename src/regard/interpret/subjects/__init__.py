"""What ``look`` and ``explain`` can show: models, each as a :class:`Subject`."""
