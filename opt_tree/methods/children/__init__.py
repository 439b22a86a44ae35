"""Children that are drawn: how siblings are picked beside `TopK`."""
