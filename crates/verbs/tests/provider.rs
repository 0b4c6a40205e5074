//! Providers: their registration, and the choice among them.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::io;
use std::net::IpAddr;

use rdmux_verbs::provider::{self, Provider};
use rdmux_verbs::{Device, OpenError, Options};

/// A provider without devices.
#[derive(Debug)]
struct Empty(&'static str);

impl Provider for Empty {
    fn name(&self) -> &'static str {
        self.0
    }

    fn open(&self, address: IpAddr, _options: &Options) -> Result<Box<dyn provider::Device>, OpenError> {
        Err(OpenError::NotOneHost(address))
    }

    fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        Ok(Vec::new())
    }
}

const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

fn open(provider: &'static str) -> Result<Device, OpenError> {
    let options = Options {
        provider: Some(provider),
        ..Options::default()
    };
    Device::open_with(LOOPBACK, options)
}

#[test]
fn register__makes_a_provider_of_another_crate_known() {
    provider::register(&Empty("empty"));
    // The second one of a name is not registered.
    provider::register(&Empty("empty"));
    assert_eq!(provider::named("empty").unwrap().name(), "empty");
    assert!(matches!(open("empty"), Err(OpenError::NotOneHost(LOOPBACK))));
    let refused = provider::named("other").unwrap_err().to_string();
    assert_eq!(refused.matches("empty").count(), 1, "{refused}");
}

#[test]
fn open__provider_that_is_not_registered() {
    let refused = open("other").unwrap_err();
    assert!(matches!(refused, OpenError::UnknownProvider(_)), "{refused:?}");
    let text = refused.to_string();
    // The other test may have registered another provider.
    assert!(text.starts_with("'other' is not a provider: give "), "{text}");
    assert!(text.contains("soft") && text.contains("hw"), "{text}");
}
