//! Providers: their registration, and the choice among them.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::io;
use std::net::IpAddr;

use rdmux_verbs::provider::{self, Provider};
use rdmux_verbs::{Device, OpenError, Options};

/// A provider without devices: opening one reports the provider's name.
#[derive(Debug)]
struct Empty(&'static str);

impl Provider for Empty {
    fn name(&self) -> &'static str {
        self.0
    }

    fn open(&self, _address: IpAddr, _options: &Options) -> Result<Box<dyn provider::Device>, OpenError> {
        Err(OpenError::Unsupported(self.0))
    }

    fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        Ok(Vec::new())
    }
}

const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// Registers two providers; the tests share a process, and the first of them to do so decides the order.
fn register() {
    for provider in [&Empty("first"), &Empty("second")] {
        provider::register(provider);
    }
}

fn open(provider: Option<&'static str>) -> Result<Device, OpenError> {
    let options = Options {
        provider,
        ..Options::default()
    };
    Device::open_with(LOOPBACK, options)
}

#[test]
fn register__makes_a_provider_of_another_crate_known() {
    register();
    // The second one of a name is not registered.
    register();
    assert_eq!(provider::named("second").unwrap().name(), "second");
    assert!(matches!(
        open(Some("second")),
        Err(OpenError::Unsupported("second"))
    ));
}

#[test]
fn open__first_registered_provider_is_the_default() {
    register();
    assert!(matches!(open(None), Err(OpenError::Unsupported("first"))));
}

#[test]
fn open__provider_that_is_not_registered() {
    register();
    let refused = open(Some("other")).unwrap_err();
    assert!(matches!(refused, OpenError::UnknownProvider(_)), "{refused:?}");
    assert_eq!(
        refused.to_string(),
        "'other' is not a provider: give first or second"
    );
}
