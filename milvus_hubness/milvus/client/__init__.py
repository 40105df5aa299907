"""The client: HubnessClient in `sync`, AsyncHubnessClient in `aio`, and the parts of both."""
