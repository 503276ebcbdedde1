#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tulle_control::fuzz::federated_members(bytes));
