//! A process that has registered no provider.
#![allow(non_snake_case, reason = "tests are named function__case")]

use rdmux_verbs::{Device, OpenError, Options, set_process_provider};

#[test]
fn open__no_provider_is_registered() {
    let address = [127, 0, 0, 1].into();
    let refused = Device::open(address).unwrap_err();
    assert!(matches!(refused, OpenError::NoProvider), "{refused:?}");
    let options = Options {
        provider: Some("soft"),
        ..Options::default()
    };
    for refused in [refused, Device::open_with(address, options).unwrap_err()] {
        let text = refused.to_string();
        assert!(text.contains("call rdmux_soft::register()"), "{text}");
    }
    let refused = set_process_provider("soft").unwrap_err().to_string();
    assert_eq!(
        refused,
        "'soft' is not a provider: the program has registered none"
    );
}
