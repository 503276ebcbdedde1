#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tulle_proxy::fuzz::client_hello(bytes));
